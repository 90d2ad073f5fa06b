"""The headers: complete, and clean under strict compilers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from normgrad.operators import OPERATORS as NORMS
from normgrad.operators import Operator
from normgrad.sdk.prototypes import INCLUDE, read_headers
from normgrad.sdk.tree import NATIVE

HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
OPERATORS = (
    "LayerNormBackward",
    "GroupNormBackward",
    "BatchNormElemtBackward",
    "LayerNorm",
    "GroupNorm",
    "BatchNormStats",
    "BatchNormGatherStatsWithCounts",
    "BatchNormElemt",
    "BatchNormReduceBackward",
)
OPERATOR_HEADERS = """
    layer_norm_backward group_norm_backward batch_norm_elemt_backward layer_norm group_norm batch_norm_stats
    batch_norm_gather_stats_with_counts batch_norm_elemt batch_norm_backward_reduce
"""
RUNTIME = """
    aclInit aclFinalize aclGetRecentErrMsg aclrtSetDevice aclrtResetDevice aclrtGetDevice aclrtGetDeviceCount
    aclrtGetRunMode aclrtSynchronizeDevice aclrtCreateContext aclrtDestroyContext aclrtSetCurrentContext
    aclrtGetCurrentContext aclrtSetSysParamOpt aclrtGetSysParamOpt aclrtCtxSetSysParamOpt aclrtCtxGetSysParamOpt
    aclrtMalloc aclrtFree aclrtMallocHost aclrtFreeHost aclrtMemcpy aclrtMemcpyAsync aclrtMemset aclrtMemsetAsync
    aclrtGetMemInfo aclrtCreateStream aclrtCreateStreamWithConfig aclrtDestroyStream aclrtSynchronizeStream
    aclrtSynchronizeStreamWithTimeout aclrtStreamQuery aclrtCreateEvent aclrtCreateEventWithFlag aclrtDestroyEvent
    aclrtRecordEvent aclrtResetEvent aclrtQueryEventStatus aclrtSynchronizeEvent aclrtStreamWaitEvent
    aclrtEventElapsedTime aclrtGetVersion aclrtGetSocName aclFloat16ToFloat aclFloatToFloat16 aclDataTypeSize
"""
META = """
    aclCreateTensor aclCreateScalar aclCreateIntArray aclCreateFloatArray aclCreateBoolArray aclCreateTensorList
    aclCreateScalarList aclDestroyTensor aclDestroyScalar aclDestroyIntArray aclDestroyFloatArray aclDestroyBoolArray
    aclDestroyTensorList aclDestroyScalarList aclGetViewShape aclGetStorageShape aclGetViewStrides aclGetViewOffset
    aclGetFormat aclGetDataType aclGetIntArraySize aclGetFloatArraySize aclGetBoolArraySize aclGetTensorListSize
    aclGetScalarListSize aclSetAclOpExecutorRepeatable aclDestroyAclOpExecutor aclSetInputTensorAddr
    aclSetOutputTensorAddr aclSetTensorAddr aclSetRawTensorAddr aclGetRawTensorAddr aclnnInit aclnnFinalize
"""
# A program that relies on what the headers bring along, on scoped enumerators and on exact signatures.
RELYING = """
#include "acl/acl.h"
#include "aclnnop/aclnn_group_norm_backward.h"
int main()
{
    std::array<bool, 3> mask = {{true, true, true}};
    int64_t least = std::min<int64_t>(1, 2);
    printf("%d", static_cast<int>(least) + mask[0] + OK);
    aclnnStatus (*destroy)(const aclTensor *) = aclDestroyTensor;
    aclError (*give)(void *) = aclrtFree;
    aclDataType type = aclDataType::ACL_FLOAT;
    aclFormat format = aclFormat::ACL_FORMAT_ND;
    aclrtMemcpyKind kind = aclrtMemcpyKind::ACL_MEMCPY_HOST_TO_DEVICE;
    uint64_t size = 0;
    aclOpExecutor *executor = nullptr;
    return destroy(nullptr) + give(nullptr) + type + format + kind + (executor != nullptr) + static_cast<int>(size);
}
"""


STRICT = ("-Wall", "-Wextra", "-pedantic", "-Werror")


def _compile(compiler: str, language: str, standard: str, text: str, folder: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    source = folder / ("source.cpp" if language == "c++" else "source.c")
    source.write_text(text)
    done = subprocess.run(
        [compiler, f"-std={standard}", *STRICT, "-fsyntax-only", f"-I{INCLUDE}", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("standard", ["c++11", "c++14", "c++17", "c++20"])
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_headers_and_a_program_are_clean(compiler: str, standard: str, tmp_path: Path) -> None:
    _compile(compiler, "c++", standard, RELYING, tmp_path)
    _compile(compiler, "c++", standard, "".join(f'#include "{header}"\n' * 2 for header in HEADERS), tmp_path)


@pytest.mark.parametrize("header", HEADERS)
def test_every_header_stands_alone(header: str, tmp_path: Path) -> None:
    _compile("g++", "c++", "c++11", f'#include "{header}"\n', tmp_path)


@pytest.mark.parametrize("standard", ["c99", "c11", "c17"])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_headers_are_clean_from_c(compiler: str, standard: str, tmp_path: Path) -> None:
    text = "".join(f'#include "{header}"\n' for header in HEADERS)
    _compile(compiler, "c", standard, f"{text}int main(void) {{ return aclInit(NULL); }}\n", tmp_path)


def test_every_function_is_declared_once() -> None:
    operators = [f"aclnn{name}{phase}" for name in OPERATORS for phase in ("", "GetWorkspaceSize")]
    declared = [function.name for function in read_headers()]
    assert sorted(declared) == sorted(RUNTIME.split() + META.split() + operators)


def test_every_header_is_there() -> None:
    expected = {"acl/acl.h", "acl/acl_rt.h", "acl/acl_base.h", "aclnn/acl_meta.h", "aclnn/aclnn_base.h"}
    expected |= {"aclnnop/aclnn_util.h"} | {f"aclnnop/aclnn_{name}.h" for name in OPERATOR_HEADERS.split()}
    assert set(HEADERS) == expected


NUMBERS = {
    "aclDataType": """DT_UNDEFINED=-1 FLOAT=0 FLOAT16=1 INT8=2 INT32=3 UINT8=4 INT16=6 UINT16=7 UINT32=8 INT64=9
        UINT64=10 DOUBLE=11 BOOL=12 STRING=13 COMPLEX64=16 COMPLEX128=17 BF16=27 INT4=29 UINT1=30 COMPLEX32=33
        HIFLOAT8=34 FLOAT8_E5M2=35 FLOAT8_E4M3FN=36 FLOAT8_E8M0=37 FLOAT6_E3M2=38 FLOAT6_E2M3=39 FLOAT4_E2M1=40
        FLOAT4_E1M2=41 FORMAT_UNDEFINED=-1 FORMAT_NCHW=0 FORMAT_NHWC=1 FORMAT_ND=2 FORMAT_NC1HWC0=3
        FORMAT_FRACTAL_Z=4 FORMAT_NC1HWC0_C04=12 FORMAT_HWCN=16 FORMAT_NDHWC=27 FORMAT_FRACTAL_NZ=29
        FORMAT_NCDHW=30 FORMAT_NDC1HWC0=32 FRACTAL_Z_3D=33 FORMAT_NC=35 FORMAT_NCL=47 FORMAT_FRACTAL_NZ_C0_16=50
        FORMAT_FRACTAL_NZ_C0_32=51 FORMAT_FRACTAL_NZ_C0_2=52 FORMAT_FRACTAL_NZ_C0_4=53 FORMAT_FRACTAL_NZ_C0_8=54""",
    "others": """MEMCPY_HOST_TO_HOST=0 MEMCPY_HOST_TO_DEVICE=1 MEMCPY_DEVICE_TO_HOST=2 MEMCPY_DEVICE_TO_DEVICE=3
        MEMCPY_DEFAULT=4 MEM_MALLOC_HUGE_FIRST=0 MEM_MALLOC_HUGE_ONLY=1 MEM_MALLOC_NORMAL_ONLY=2
        MEM_MALLOC_HUGE_FIRST_P2P=3 MEM_MALLOC_HUGE_ONLY_P2P=4 MEM_MALLOC_NORMAL_ONLY_P2P=5 OPT_DETERMINISTIC=0
        OPT_ENABLE_DEBUG_KERNEL=1 OPT_STRONG_CONSISTENCY=2 DDR_MEM=0 HBM_MEM=1 DEVICE=0 HOST=1 SUCCESS=0
        ERROR_INVALID_PARAM=100000 ERROR_UNINITIALIZE=100001 ERROR_REPEAT_INITIALIZE=100002
        ERROR_REPEAT_FINALIZE=100037 ERROR_BAD_ALLOC=200000 ERROR_API_NOT_SUPPORT=200001 ERROR_INTERNAL_ERROR=500000
        ERROR_FAILURE=500001 ERROR_RT_PARAM_INVALID=107000 ERROR_RT_INVALID_DEVICEID=107001
        ERROR_RT_CONTEXT_NULL=107002 ERROR_RT_INVALID_HANDLE=107017 ERROR_RT_WAIT_TIMEOUT=107019
        ERROR_RT_SYSPARAMOPT_NOT_SET=107021 ERROR_RT_FEATURE_NOT_SUPPORT=207000
        ERROR_RT_MEMORY_ALLOCATION=207001""",
}


def test_numbers_are_the_interfaces(tmp_path: Path) -> None:
    pairs = [item.split("=") for text in NUMBERS.values() for item in text.split()]
    pairs += [("NN_ERR_PARAM_NULLPTR", "161001"), ("NN_ERR_PARAM_INVALID", "161002"), ("NN_SUCCESS", "0")]
    pairs += [("NN_ERR_RUNTIME_ERROR", "361001"), ("NN_ERR_INNER", "561000"), ("NN_ERR_INNER_NULLPTR", "561103")]
    pairs += [("NN_ERR_INNER_FIND_KERNEL_ERROR", "561003"), ("NN_ERR_INNER_CREATE_EXECUTOR", "561101")]
    names = [f"ACL{name}" if name.startswith("NN_") else f"ACL_{name}" for name, _ in pairs]
    asserts = "".join(f'static_assert({n} == {v}, "{n}");\n' for n, (_, v) in zip(names, pairs, strict=True))
    _compile("g++", "c++", "c++11", f'#include "acl/acl.h"\n#include "aclnn/acl_meta.h"\n{asserts}', tmp_path)


@pytest.mark.parametrize("op", NORMS.values(), ids=NORMS)
def test_the_header_names_the_parameters_of_the_signature_in_order(op: Operator) -> None:
    """Words are handed over by position: the names are what can be compared."""
    functions = {function.name: function for function in read_headers()}
    planned = [argument.name for argument in functions[f"{op.signature.c_name}GetWorkspaceSize"].arguments]
    assert planned == [*(parameter.c_name for parameter in op.signature.parameters), "workspaceSize", "executor"]
    run = [argument.name for argument in functions[op.signature.c_name].arguments]
    assert run == ["workspace", "workspaceSize", "executor", "stream"]


def test_a_type_that_fits_no_word_is_refused(tmp_path: Path) -> None:
    """As an int64 a float would be truncated, and a structure passed by value would not be passed at all."""
    for kind in ("float", "const float", "aclFloat16", "struct Thing", "int", "int64_t"):
        (tmp_path / "one.h").write_text(f"ACL_API aclError aclOne({kind} value, size_t count);\n")
        (function,) = read_headers(tmp_path)
        if kind == "int64_t":
            assert function.codes == "qQ"
            continue
        with pytest.raises(ValueError, match=rf"value is of the C type {kind}, .* int64_t"):
            _ = function.codes
        with pytest.raises(ValueError, match="value is of the C type"):
            _ = function.arguments[0].word


def test_every_function_that_python_serves_has_words() -> None:
    for function in read_headers():
        if function.name not in NATIVE:
            assert len(function.codes) == len(function.arguments)
