"""Create the tree that programs written for CANN build against: headers, one library under all its names, set_env.sh.

The tree has CANN's layout, and users of CANN have a tree of that layout already. So a file is written only where there
is none or where normgrad wrote the one that is there, and never through a symbolic link. Everything is checked before
anything is written.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from normgrad.sdk.prototypes import INCLUDE, Prototype, read_headers

LIBRARY = "libascendcl.so"
#: The other names that programs link to.
OTHER_NAMES = ("libacl_rt.so", "libnnopbase.so", "libopapi_nn.so", "libopapi_math.so", "libopapi.so")
#: Functions that library.c holds itself.
NATIVE = ("aclGetRecentErrMsg", "aclFloat16ToFloat", "aclFloatToFloat16", "aclDataTypeSize")

_PACKAGE = Path(__file__).parents[1]
_MODULE = "_normgrad_sdk"
_SCRIPT = "set_env.sh"
_SCRIPT_HEAD = "# Source this file: programs written for CANN then build and run against normgrad.\n"
_HEADER_MARK = b"Part of normgrad"  # in the first line of every header
_LIBRARY_MARK = f"PyInit_{_MODULE}".encode()  # an exported symbol of the library
_INTERFACE = """
extern "Python" void normgrad_call(int32_t function, const uint64_t *words, int64_t *result);
void normgrad_set_text(const char *text);
int normgrad_copy(uint64_t to, uint64_t from, uint64_t nbytes);
void normgrad_move(uint64_t to, uint64_t from, uint64_t nbytes);
void normgrad_fill(uint64_t to, int32_t value, uint64_t nbytes);
uint64_t normgrad_allocate(uint64_t nbytes);
void normgrad_release(uint64_t address);
uint64_t normgrad_new_array(uint64_t nbytes);
void normgrad_started(void);
void normgrad_ended(void);
"""
_WORD_OF_DOUBLE = """
static uint64_t word_of_double(double value)
{
    uint64_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}
"""


class SdkError(Exception):
    """The tree cannot be created; the text says why and what would help."""


def build(directory: str | os.PathLike[str]) -> Path:
    """Create the tree in a directory, or update the one that an earlier call created there; return its absolute path.

    Raises SdkError, with nothing changed, where the directory holds a file or a symbolic link under a name of the tree
    that normgrad did not write.
    """
    if not os.fspath(directory).strip():
        raise SdkError("the folder's name is empty, and must name the folder to create, such as ./sdk")
    home = Path(directory).resolve()
    if not sys.platform.startswith("linux"):
        raise SdkError(f"the SDK is for Linux, and this is {sys.platform}")
    texts = {Path("include") / path.relative_to(INCLUDE): path.read_bytes() for path in INCLUDE.rglob("*.h")}
    texts[Path(_SCRIPT)] = _set_env(home).encode()
    try:
        _refuse_foreign_files(home, [*texts, Path("lib64") / LIBRARY])
        library = _compiled(_compiler(), _shared_python())
        home.mkdir(parents=True, exist_ok=True)
        for path, content in texts.items():
            _write(home / path, content)
        _write(home / "lib64" / LIBRARY, library, mode=0o755)
        for name in OTHER_NAMES:
            if not (home / "lib64" / name).is_symlink():
                (home / "lib64" / name).symlink_to(LIBRARY)
    except OSError as error:
        raise SdkError(f"{error.filename or home}: cannot be written: {error.strerror or error}") from error
    return home


def _refuse_foreign_files(home: Path, files: Iterable[Path]) -> None:
    """Raise SdkError where a file of the tree would replace one of someone else, or be written through a link."""
    if home.exists() and not home.is_dir():
        raise _foreign(home, "is not a folder")
    files = list(files)
    for folder in sorted({folder for file in files for folder in file.parents} - {Path()}):
        if (home / folder).is_symlink():
            raise _foreign(home / folder, "is a symbolic link")
        if (home / folder).exists() and not (home / folder).is_dir():
            raise _foreign(home / folder, "is not a folder")
    for file in files:
        path = home / file
        if path.is_symlink():
            raise _foreign(path, "is a symbolic link")
        if path.is_file() and not _is_ours(path):
            raise _foreign(path, "is not normgrad's")
        if path.exists() and not path.is_file():
            raise _foreign(path, "is not a file")
    for name in OTHER_NAMES:
        link = home / "lib64" / name
        if os.path.lexists(link) and not (link.is_symlink() and os.readlink(link) == LIBRARY):
            raise _foreign(link, f"is not normgrad's link to {LIBRARY}")


def _foreign(path: Path, problem: str) -> SdkError:
    return SdkError(f"{path}: {problem}, and is not overwritten; nothing was changed: choose another folder")


def _is_ours(path: Path) -> bool:
    """Whether normgrad wrote the file: every file of the tree has something that only normgrad's has."""
    content = path.read_bytes()
    if path.name == LIBRARY:
        return _LIBRARY_MARK in content
    first_line = content.partition(b"\n")[0]
    return first_line == _SCRIPT_HEAD.encode().rstrip() if path.name == _SCRIPT else _HEADER_MARK in first_line


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Put a file into place in one step: a program that has the old library loaded keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".normgrad-{secrets.token_hex(8)}")
    try:
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _compiler() -> list[str]:
    chosen = os.environ.get("CC")
    candidates = [shlex.split(chosen)] if chosen else [["cc"], ["gcc"], ["clang"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    if chosen:
        raise SdkError(f"the C compiler that CC names, {chosen!r}, is not there")
    raise SdkError("no C compiler was found (cc, gcc or clang); install one, or name it in the environment variable CC")


def _shared_python() -> Path:
    """The shared library of this Python, which the tree's library links to."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SdkError(
            f"Python's headers are not in {sysconfig.get_path('include')}; install them (python3-dev, python3-devel)"
        )
    name = sysconfig.get_config_var("INSTSONAME") or ""
    base = Path(sys.base_prefix)
    folders = [sysconfig.get_config_var("LIBDIR"), base / "lib", base / "lib64", sysconfig.get_config_var("LIBPL")]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    if multiarch:
        folders.append(base / "lib" / multiarch)
    for folder in folders:
        if folder and ".so" in name and (Path(folder) / name).exists():
            return Path(folder) / name
    raise SdkError(
        f"this Python ({sys.executable}) has no shared libpython, which the library needs; "
        "use a Python built with --enable-shared (most distributions' are; pyenv: "
        "PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install …)"
    )


def _compiled(compiler: list[str], python: Path) -> bytes:
    """The library's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / f"{_MODULE}.c", Path(folder) / LIBRARY
        _emit(source)
        command = [
            *compiler,
            "-shared",
            "-fPIC",
            "-O2",
            "-pthread",
            "-fvisibility=hidden",
            "-D_GNU_SOURCE",
            "-DNDEBUG",
            "-include",
            str(Path(__file__).with_name("before.h")),
            f"-I{INCLUDE}",
            f"-I{sysconfig.get_path('include')}",
            f"-I{sysconfig.get_path('platinclude')}",
            *shlex.split(os.environ.get("CFLAGS", "")),
            str(source),
            str(python),
            f"-Wl,-rpath,{python.parent}",
            f"-Wl,-soname,{LIBRARY}",
            "-Wl,-z,nodelete",  # Python's threads may be inside when a program closes the library
            "-ldl",
            "-o",
            str(made),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            raise SdkError(f"the C compiler failed:\n{shlex.join(command)}\n{done.stderr.strip()}")
        return made.read_bytes()


def _emit(source: Path) -> None:
    """Write the library's C source, by the embedding of cffi."""
    try:
        import cffi
    except ImportError:
        raise SdkError("cffi is not installed; pip install 'normgrad[sdk]'") from None
    try:
        _emit_by(cffi, source)
    except OSError:
        raise
    except Exception as error:  # another cffi may lack a method, or take other arguments
        raise SdkError(
            f"cffi {getattr(cffi, '__version__', 'of an unknown version')} cannot write the library's source "
            f"({type(error).__name__}: {error}); install one that can: pip install 'normgrad[sdk]'"
        ) from error


def _emit_by(cffi: ModuleType, source: Path) -> None:
    functions = [function for function in read_headers() if function.name not in NATIVE]
    builder = cffi.FFI()
    builder.embedding_api("")
    builder.cdef(_INTERFACE)
    builder.set_source(_MODULE, "".join(_native_half(functions)))
    table = tuple((function.name, function.codes, function.returns) for function in functions)
    builder.embedding_init_code(
        f"from {_MODULE} import ffi, lib\nfrom normgrad.sdk.entry import start\nstart(ffi, lib, {table!r})\n"
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it says what it writes
        builder.emit_c_code(str(source))


def _native_half(functions: Iterable[Prototype]) -> Iterator[str]:
    yield f"#define NORMGRAD_PYTHON {_c_string(sys.executable)}\n"
    yield f"#define NORMGRAD_PACKAGE {_c_string(str(_PACKAGE))}\n"
    yield f"#define NORMGRAD_FIND {_c_string(_find_packages_code())}\n"
    yield Path(__file__).with_name("library.c").read_text(encoding="utf-8")
    yield _WORD_OF_DOUBLE
    for header in sorted((INCLUDE / "aclnnop").glob("*.h")):
        yield f'#include "aclnnop/{header.name}"\n'
    for number, function in enumerate(functions):
        parameters = ", ".join(f"{argument.type} {argument.name}" for argument in function.arguments) or "void"
        words = ", ".join(argument.word for argument in function.arguments) or "0"
        outcome = f"call({number}, words, {function.failure})"
        cast = "(uintptr_t)" if "*" in function.returns else ""
        yield (
            f"\n{function.returns} {function.name}({parameters})\n{{\n"
            f"    const uint64_t words[] = {{{words}}};\n"
            f"    return ({function.returns}){cast}{outcome};\n}}\n"
        )


def _find_packages_code() -> str:
    """Python code that makes this environment's packages importable, in an interpreter of ours or another's."""
    package = str(_PACKAGE.parent)
    # The directory that the command runs in is on the path by accident, unless the package lies there.
    paths = [path for path in map(os.path.abspath, filter(None, sys.path)) if path != os.getcwd() or path == package]
    return (
        "import sys\n"
        f"paths = {list(dict.fromkeys(paths))!r}\n"
        "if ours:\n"
        "    sys.path[:] = paths + [path for path in sys.path if path not in paths]\n"
        "else:\n"
        "    sys.path.extend(path for path in paths if path not in sys.path)\n"
    )


def _c_string(text: str) -> str:
    """A C string literal of UTF-8 text. Octal escapes, since those end after three digits."""
    plain = {ord(c) for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _./-+=(),:[]"}
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in text.encode()) + '"'


def _set_env(home: Path) -> str:
    return (
        _SCRIPT_HEAD + f"export ASCEND_HOME_PATH={shlex.quote(str(home))}\n"
        'export ASCEND_CUSTOM_PATH="$ASCEND_HOME_PATH"\n'
        'export LD_LIBRARY_PATH="$ASCEND_HOME_PATH/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n'
    )
