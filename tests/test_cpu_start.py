"""Where compiled kernels are kept, what is taken for one, and how a process starts: from disk, without Numba."""

from __future__ import annotations

import gc
import os
import pty
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import normgrad
from normgrad import log
from normgrad.cpu.compile import disk_cache, kernel_lookup, object_code
from normgrad.cpu.tags import F32
from support.processes import run_python

_CALL = """
import sys, numpy as np, ml_dtypes, normgrad
x = np.arange(24).reshape(2, 3, 4).astype(sys.argv[1] if len(sys.argv) > 1 else "float32")
print(normgrad.batch_norm_stats(x)[0].tolist(), "numba" in sys.modules, normgrad.__file__)
"""
_MEAN = "[7.5, 11.5, 15.5]"
_COMPILED, _FROM_DISK = f"{_MEAN} True", f"{_MEAN} False"
_NEEDS_MODES = pytest.mark.skipif(os.name == "nt", reason="folders on Windows have no such mode")


def _start(**environment: str) -> str:
    """The outcome of one process: the result, and whether Numba was there."""
    environment = {"NORMGRAD_BACKEND": "cpu", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return " ".join(run_python(_CALL, **environment).split()[:4])


def _kept(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.code"))


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A user with a home and temporary files of the test's own, and no wishes."""
    for name in (disk_cache.ENVIRONMENT, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    return {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}


# Where


def test_a_package_that_cannot_be_written_to(tmp_path: Path, homeless: dict[str, str]) -> None:
    """Nothing is ever written beside the package, whether its folders forbid it or, as for root, do not."""
    package = tmp_path / "site" / "normgrad"
    shutil.copytree(Path(normgrad.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    folders = [path for path in (package, *package.rglob("*")) if path.is_dir()]
    before = sorted(package.rglob("*"))
    for path in folders:
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{_CALL}"
    try:
        outcomes = [run_python(code, NORMGRAD_BACKEND="cpu", PYTHONDONTWRITEBYTECODE="1", **homeless) for _ in range(2)]
        assert outcomes == [f"{outcome} {package}/__init__.py\n" for outcome in (_COMPILED, _FROM_DISK)]
        assert sorted(package.rglob("*")) == before
        assert len(_kept(tmp_path / "home" / ".cache" / "normgrad")) == 1
    finally:
        for path in folders:
            path.chmod(stat.S_IRWXU)


def test_the_folder_that_the_environment_names(tmp_path: Path, homeless: dict[str, str]) -> None:
    named = tmp_path / "named" / "and new"
    assert _start(**homeless, NORMGRAD_CACHE_DIR=str(named)) == _COMPILED
    assert _start(**homeless, NORMGRAD_CACHE_DIR=str(named)) == _FROM_DISK
    assert len(_kept(named)) == len(_kept(tmp_path)) == 1


def test_a_home_that_cannot_be_written_to(tmp_path: Path, homeless: dict[str, str]) -> None:
    (tmp_path / "file").touch()  # below a file there can be no folder, not even for root
    nowhere = homeless | {"HOME": str(tmp_path / "file")}
    assert [_start(**nowhere), _start(**nowhere)] == [_COMPILED, _FROM_DISK]
    (kept,) = _kept(tmp_path / "temporary")
    assert not kept.parent.stat().st_mode & 0o077


def test_nowhere_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert _start(NORMGRAD_CACHE_DIR=str(tmp_path / "file" / "below")) == _COMPILED


# Whose


def _cache_in(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the environment name a cache folder in one of the ways that it can, and return the folder."""
    for name in (disk_cache.ENVIRONMENT, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # below which there can be no folder
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    match where:
        case "environment":
            monkeypatch.setenv(disk_cache.ENVIRONMENT, str(tmp_path / "cache"))
            return tmp_path / "cache"
        case "XDG_CACHE_HOME":
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
            return tmp_path / "normgrad"
        case "home":
            monkeypatch.setenv("HOME", str(tmp_path))
            return tmp_path / ".cache" / "normgrad"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"normgrad-{os.geteuid()}"


@_NEEDS_MODES
@pytest.mark.parametrize("fault", ["another's", "writable by the group", "writable by all", "a link"])
@pytest.mark.parametrize("where", ["environment", "XDG_CACHE_HOME", "home", "temporary"])
def test_a_folder_that_others_may_have_written_to_is_not_used(
    where: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _cache_in(where, tmp_path, monkeypatch)
    monkeypatch.setattr(log, "_reported", set())
    kept = disk_cache.keep("name", "key", b"code")
    assert kept is not None
    assert (kept.parent, disk_cache.find("name", "key")) == (folder, b"code")
    match fault:
        case "another's":
            user = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
            folder.rename(folder.parent / f"normgrad-{user + 1}") if where == "temporary" else None
        case "writable by the group":
            folder.chmod(0o720)
        case "writable by all":
            folder.chmod(0o702)
        case "a link":
            folder.rename(tmp_path / "elsewhere")
            folder.symlink_to(tmp_path / "elsewhere")
    before = _kept(tmp_path)
    assert disk_cache.find("name", "key") is None
    assert [disk_cache.keep("name", "another", b"code") for _ in range(2)] == [None, None]
    assert _kept(tmp_path) == before
    (record,) = caplog.records
    assert record.name == "normgrad"
    assert folder.name.partition("-")[0] in record.message
    assert {"another's": "belong", "a link": "link"}.get(fault, "chmod go-w") in record.message


@_NEEDS_MODES
@pytest.mark.parametrize("fault", ["a link", "a pipe", "40 GiB", "writable by all", "another's", "a folder"])
def test_only_a_plain_file_of_the_users_own_is_read(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(disk_cache.ENVIRONMENT, str(tmp_path / "cache"))
    kept = disk_cache.keep("name", "key", b"code")
    assert kept is not None
    match fault:
        case "a link":
            kept.rename(tmp_path / "planted")
            kept.symlink_to(tmp_path / "planted")
        case "a pipe":
            kept.unlink()
            os.mkfifo(kept)
        case "40 GiB":
            os.truncate(kept, 40 << 30)
        case "writable by all":
            kept.chmod(0o602)
        case "another's" if os.geteuid() == 0:
            os.chown(kept, 1, -1)
        case "another's":
            pytest.skip("only root can give a file away")
        case "a folder":
            kept.unlink()
            kept.mkdir()
    assert disk_cache.find("name", "key") is None
    if fault != "a folder":
        assert disk_cache.keep("name", "key", b"code") == kept
        assert disk_cache.find("name", "key") == b"code"


# What is taken for a kernel


def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    assert _start(NORMGRAD_CACHE_DIR=str(tmp_path)) == _COMPILED
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert _start(NORMGRAD_CACHE_DIR=str(tmp_path)) == _FROM_DISK
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    assert _start(NORMGRAD_CACHE_DIR=str(tmp_path)) == _COMPILED
    (path,) = _kept(tmp_path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = (b"", whole[:20], whole[:-1], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    for data in damaged:
        path.write_bytes(data)
        assert disk_cache.find("", "") is None
        assert _start(NORMGRAD_CACHE_DIR=str(tmp_path)) == _COMPILED
        assert path.read_bytes() == whole  # the same source gives the same code


def test_a_file_is_held_to_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk_cache.ENVIRONMENT, str(tmp_path))
    path = disk_cache.keep("name", "key", b"code")
    assert path is not None
    assert disk_cache.find("name", "key") == b"code"
    assert disk_cache.find("name", "another") is None
    (tmp_path / disk_cache._file("name", "another")).write_bytes(path.read_bytes())
    assert disk_cache.find("name", "another") is None


def test_what_nobody_uses_any_more_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk_cache.ENVIRONMENT, str(tmp_path))
    files = {name: tmp_path / disk_cache._file("name", name) for name in ("forgotten", "used", "recent")}
    for name in files:
        disk_cache.keep("name", name, b"code")
    files |= {name: tmp_path / name for name in (".unfinished-old", ".unfinished-new", "another's")}
    for path in files.values():
        path.touch()
    days = {"forgotten": 91, "used": 91, "recent": 89, ".unfinished-old": 2, ".unfinished-new": 0, "another's": 1000}
    for name, age in days.items():
        then = time.time() - age * 24 * 60 * 60
        os.utime(files[name], (then, then))
    assert disk_cache.find("name", "used") == b"code"
    assert all(path.exists() for path in files.values())
    disk_cache.keep("name", "new", b"code")
    assert {name for name, path in files.items() if not path.exists()} == {"forgotten", ".unfinished-old"}
    assert disk_cache.find("name", "new") == b"code"


def test_the_folder_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disk_cache.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(disk_cache, "_MOST_BYTES", 10_000)
    for number in range(20):
        kept = disk_cache.keep("name", str(number), bytes(2000))
        assert kept is not None
        os.utime(kept, (number, time.time() - 100 + number))
        assert disk_cache.find("name", str(number)) == bytes(2000)
    assert [key for key in map(str, range(20)) if disk_cache.find("name", key)] == ["16", "17", "18", "19"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
{_CALL}
"""
    where = {"NORMGRAD_CACHE_DIR": str(tmp_path), "NORMGRAD_BACKEND": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    assert " ".join(run_python(code, **where).split()[:4]) == _COMPILED
    assert not list(tmp_path.iterdir())
    assert _start(NORMGRAD_CACHE_DIR=str(tmp_path)) == _COMPILED
    assert _start(NORMGRAD_CACHE_DIR=str(tmp_path)) == _FROM_DISK


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_a_process_that_is_killed_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, signal
from normgrad.cpu.compile import disk_cache
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
disk_cache.keep("name", "key", b"code")
"""
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": path, disk_cache.ENVIRONMENT: str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -signal.SIGKILL
    monkeypatch.setenv(disk_cache.ENVIRONMENT, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    assert disk_cache.find("name", "key") is None
    disk_cache.keep("name", "key", b"code")
    assert disk_cache.find("name", "key") == b"code"


def test_another_source_is_another_kernel(tmp_path: Path) -> None:
    package = tmp_path / "site" / "normgrad"
    shutil.copytree(Path(normgrad.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{_CALL}"
    where = {"NORMGRAD_BACKEND": "cpu", "NORMGRAD_CACHE_DIR": str(tmp_path / "cache")}
    assert _COMPILED in run_python(code, **where)
    source = package / "cpu" / "intrinsics" / "vectors.py"  # a module that the kernel's own module imports
    source.write_text(source.read_text() + "\n# changed\n")
    assert _COMPILED in run_python(code, **where)
    assert len(_kept(tmp_path / "cache")) == 2


def test_every_source_file_of_the_backend_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in folders too: a kernel that is not compiled again after a change would silently be the old one."""
    copy = tmp_path / "cpu"
    shutil.copytree(kernel_lookup._BACKEND, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernel_lookup, "_BACKEND", copy)
    digest = kernel_lookup._sources.__wrapped__
    files = sorted(copy.rglob("*.py"))
    assert {path.parent.name for path in files} >= {"cpu", "kernels", "common", "intrinsics", "compile"}
    for path in files:
        before, source = digest("normgrad"), path.read_bytes()
        path.write_bytes(source + b"#")
        assert digest("normgrad") != before, path
        path.write_bytes(source)


@pytest.mark.parametrize("changed", ["numba", "machine"])
def test_another_numba_or_machine_is_another_kernel(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the keys are of interest here: nothing is compiled."""
    from normgrad.cpu.compile import jit

    keys: list[str] = []
    monkeypatch.setattr(jit.internal_compiler, "compiled", lambda *kernel: b"")
    monkeypatch.setattr(object_code, "loaded", lambda code, symbol: len)
    monkeypatch.setattr(disk_cache, "find", lambda name, key: keys.append(key))
    monkeypatch.setattr(disk_cache, "keep", lambda name, key, code: None)
    kernel = kernel_lookup.Kernel("normgrad.cpu.kernels.copy", "fill")
    kernel_lookup._load(kernel, ())
    monkeypatch.setattr(
        *((kernel_lookup, "_numba") if changed == "numba" else (object_code, "_processor")), lambda: "another"
    )
    object_code.identity.cache_clear()
    kernel_lookup._load(kernel, ())
    object_code.identity.cache_clear()
    assert keys[0] != keys[1]


def test_code_that_needs_more_than_c_runs_and_is_not_kept(tmp_path: Path) -> None:
    code = """
import numpy as np
from normgrad.cpu.compile import kernel_lookup
descriptor = np.array([5, 0], np.int64)
assert kernel_lookup.Kernel("support.needy", "needy").entry(())(descriptor.ctypes.data) == 0
print(descriptor.tolist())
"""
    assert run_python(code, NORMGRAD_CACHE_DIR=str(tmp_path)) == "[5, 5]\n"
    assert not list(tmp_path.iterdir())


_SYSTEM = """
declare i32 @system(i8*)
define i32 @symbol(i64 %descriptor) {
    %status = call i32 @system(i8* null)
    ret i32 %status
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only ELF tells its symbols")
@pytest.mark.parametrize("planted", ["calls system", "truncated"])
def test_kept_code_that_needs_more_than_c_is_not_loaded(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    from normgrad.cpu.compile import jit

    code = bytes(object_code.target_machine().emit_object(llvm.parse_assembly(_SYSTEM)))
    assert object_code.needs(code) == ["system"]
    loaded: list[bytes] = []
    monkeypatch.setattr(disk_cache, "find", lambda name, key: code if planted == "calls system" else code[:100])
    monkeypatch.setattr(disk_cache, "keep", lambda name, key, code: None)
    monkeypatch.setattr(jit.internal_compiler, "compiled", lambda *kernel: b"compiled here")
    monkeypatch.setattr(object_code, "loaded", lambda code, symbol: loaded.append(code))
    kernel_lookup._load(kernel_lookup.Kernel("normgrad.cpu.kernels.copy", "fill"), ())
    assert loaded == [b"compiled here"]


def test_names_that_code_looks_for(tmp_path: Path) -> None:
    from normgrad.cpu.compile.compiler import compiled

    assert object_code.needs(b"\xcf\xfa\xed\xfe of another format") == []
    if sys.platform == "linux":
        assert object_code.needs(compiled("support.needy", "needy", (), "symbol")) == ["PyGILState_Check"]
        assert object_code.needs(compiled("normgrad.cpu.kernels.copy", "copy", (F32, F32), "symbol")) == ["sched_yield"]


# Processes and threads


def test_many_processes_that_start_at_once(tmp_path: Path) -> None:
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": path, "NORMGRAD_CACHE_DIR": str(tmp_path), "NORMGRAD_BACKEND": "cpu"}
    for outcome in ("True", "False"):  # compiled, then loaded
        started = [
            subprocess.Popen([sys.executable, "-c", _CALL, dtype], env=environment, stdout=subprocess.PIPE, text=True)
            for dtype in ("float32", "float32", "float16", "bfloat16")
        ]
        said = [process.communicate(timeout=300)[0] for process in started]
        assert [" ".join(text.split()[:4]) for text in said] == [f"{_MEAN} {outcome}"] * 4
    assert len(_kept(tmp_path)) == len(list(tmp_path.iterdir())) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_a_kernel_is_compiled(tmp_path: Path) -> None:
    code = """
import os, threading, time, numpy as np, normgrad, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is the point
from normgrad.cpu.compile import kernel_lookup
x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
thread = threading.Thread(target=normgrad.batch_norm_stats, args=(x,))
thread.start()
while kernel_lookup._lock.acquire(blocking=False):  # until the thread has it
    kernel_lookup._lock.release()
    time.sleep(0.001)
child = os.fork()
if child == 0:
    right = normgrad.batch_norm_stats(x)[0].tolist() == [7.5, 11.5, 15.5]
    os._exit(0 if right else 1)
thread.join()
print(os.waitpid(child, 0)[1])
"""
    assert run_python(code, NORMGRAD_BACKEND="cpu", NORMGRAD_CACHE_DIR=str(tmp_path)) == "0\n"


@pytest.mark.skipif(os.name == "nt", reason="there are no such terminals")
def test_a_line_tells_on_a_terminal_what_takes_so_long(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "NORMGRAD_CACHE_DIR": str(tmp_path), "NORMGRAD_BACKEND": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    code = "from normgrad import log; log._ANNOUNCE_AFTER = 0.01\n" + _CALL
    said = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=slave, stdout=subprocess.PIPE)
        process.communicate(timeout=300)
        os.write(slave, b"|")
        heard = b""
        while not heard.endswith(b"|"):  # a read may give a part
            heard += os.read(master, 10_000)
        said.append(heard.decode())
    line = "normgrad: compiling batch_norm_stats (once; kept on disk) …"
    assert said == [f"{line}\r{' ' * len(line)}\r|", "|"]


def test_a_process_without_standard_error_compiles(tmp_path: Path) -> None:
    """As under pythonw.exe, or as a service."""
    code = "import sys; sys.stderr = None\n" + _CALL
    assert _COMPILED in run_python(code, NORMGRAD_BACKEND="cpu", NORMGRAD_CACHE_DIR=str(tmp_path))


def test_a_function_is_translated_once_for_all_constants() -> None:
    from numba.core import types

    from normgrad.cpu.compile.jit import device

    @device
    def moved(address, field):  # type: ignore[no-untyped-def]
        return address + 8 * field

    for constant in (1, 2):
        moved.get_call_template((types.int64, types.literal(constant)), {})
    assert list(moved.overloads) == [(types.int64, types.int64)]


def test_no_function_is_always_inlined_because_its_first_caller_is() -> None:
    """A kernel's code would depend on the kernels that were compiled before it."""
    from numba.core import types

    from normgrad.cpu.compile.jit import device, inline

    @device
    def called(address):  # type: ignore[no-untyped-def]
        return address + 8

    @inline
    def caller(address):  # type: ignore[no-untyped-def]
        return called(address)

    caller.get_call_template((types.int64,), {})
    assert [found.fndesc.inline for found in called.overloads.values()] == [False]


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_compiling_as_it_was_before(collects: bool) -> None:
    from normgrad.cpu.compile.compiler import compiled

    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        compiled("normgrad.cpu.threads.worker_loop", "serve", (), "serve_again")
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()
