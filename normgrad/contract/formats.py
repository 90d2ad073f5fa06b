"""Format labels: the plain ones change nothing (the view speaks), the blocked ones are refused."""

from __future__ import annotations

from enum import IntEnum


class Format(IntEnum):
    """Format labels with their numbers in the C interface."""

    UNDEFINED = -1
    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    NC1HWC0_C04 = 12
    HWCN = 16
    NDHWC = 27
    FRACTAL_NZ = 29
    NCDHW = 30
    NDC1HWC0 = 32
    FRACTAL_Z_3D = 33
    NC = 35
    NCL = 47
    FRACTAL_NZ_C0_16 = 50
    FRACTAL_NZ_C0_32 = 51
    FRACTAL_NZ_C0_2 = 52
    FRACTAL_NZ_C0_4 = 53
    FRACTAL_NZ_C0_8 = 54


def format_name(label: int) -> str:
    """Return the name of a label; of one that is not known its number."""
    try:
        return Format(label).name
    except ValueError:
        return str(label)


#: The labels that are taken.
PLAIN_FORMATS = (
    Format.ND,
    Format.NCHW,
    Format.NHWC,
    Format.NCL,
    Format.NC,
    Format.NCDHW,
    Format.NDHWC,
    Format.HWCN,
)
