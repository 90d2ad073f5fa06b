"""The tree: every way to build against it, and clear words where it cannot be made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
from expected import EXPECTED

from conftest import environment
from normgrad import sdk
from normgrad.cli import main
from normgrad.sdk import tree

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "examples" / "cpp"
PAGE = ROOT / "docs" / "guides" / "sdk.md"


@pytest.mark.parametrize(
    "libraries",
    [
        ("-lascendcl", "-lnnopbase", "-lopapi_nn", "-lopapi_math"),
        ("-lascendcl", "-lnnopbase", "-lopapi"),
        ("-lacl_rt", "-lnnopbase", "-lopapi_nn", "-lopapi_math"),
    ],
    ids=["current", "older", "newer"],
)
@pytest.mark.parametrize("standard", ["c++11", "c++20"])
def test_compile_lines(build, run, libraries: tuple[str, ...], standard: str) -> None:
    program = build(SAMPLES / "layer_norm_backward.cpp", libraries=libraries, standard=standard)
    done = run(program)
    assert (done.stdout, done.returncode) == (EXPECTED["layer_norm_backward"], 0), done.stderr


def test_samples_build_with_cmake_after_set_env_and_print_what_is_right(home: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    script = f"""
        set -e
        . '{home}/set_env.sh'
        cmake -S '{SAMPLES}' -B '{tmp_path}' -DCMAKE_CXX_FLAGS=-Werror
        cmake --build '{tmp_path}'
        for sample in {" ".join(EXPECTED)}; do '{tmp_path}'/$sample > '{tmp_path}'/$sample.out; done
    """
    kept = {
        name: value for name, value in environment(home).items() if name not in ("ASCEND_HOME_PATH", "LD_LIBRARY_PATH")
    }
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, env=kept)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: (tmp_path / f"{name}.out").read_text() for name in EXPECTED} == EXPECTED


def test_the_page_is_true(tmp_path: Path) -> None:
    """The commands of docs/guides/sdk.md, one after the other, print what it shows under them."""
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    blocks = re.findall(r"^```(sh|text)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    commands = "".join(content for language, content in blocks if language == "sh")
    shown = [content for language, content in blocks if language == "text"]
    script = f'set -e\nnormgrad() {{ "{sys.executable}" -m normgrad "$@"; }}\n{commands}'
    variables = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=variables, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(shown) == 2
    assert all(text in done.stdout for text in shown), done.stdout


def test_what_the_page_shows_of_repeatable_executors_works(build, run, tmp_path: Path) -> None:
    """In place of the run of the whole program, whose two tensors of data have the same values."""
    (shown,) = re.findall(
        r"^```cpp\n(CHECK\(aclSetAclOpExecutorRepeatable.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M
    )
    sample = (SAMPLES / "minimal.cpp").read_text(encoding="utf-8")
    once = "    CHECK(aclnnLayerNormBackward(workspace, workspaceSize, executor, stream));\n"
    assert sample.count(once) == 1
    program = tmp_path / "repeatable.cpp"
    program.write_text(sample.replace(once, f"void *nextBatch = memory[0];\n{shown}"), encoding="utf-8")
    done = run(build(program))
    assert done.stdout.startswith("gradInput: -2 -94 -877.5 -1747.5\ngradWeight: 20 62\n"), done.stdout + done.stderr


def test_the_page_shows_the_sample_and_the_headers() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"```cpp\n{(SAMPLES / 'minimal.cpp').read_text(encoding='utf-8')}```\n" in page
    plans = 0
    for header in (tree.INCLUDE / "aclnnop").glob("*.h"):
        for plan in re.findall(r"aclnnStatus \w+GetWorkspaceSize\([^;]*;", header.read_text(encoding="utf-8")):
            plans += 1
            assert f"// aclnnop/{header.name}\n{plan}\n" in page, plan
    assert plans == 9


def test_set_env_keeps_what_was_on_the_path(home: Path) -> None:
    script = (
        f'. \'{home}/set_env.sh\'; printf \'%s|%s|%s\' "$ASCEND_HOME_PATH" "$ASCEND_CUSTOM_PATH" "$LD_LIBRARY_PATH"'
    )
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=True, env={"LD_LIBRARY_PATH": "/other"}
    )
    assert done.stdout == f"{home}|{home}|{home}/lib64:/other"


def test_one_library_has_all_names(home: Path) -> None:
    names = {path.name for path in (home / "lib64").iterdir()}
    assert names == {"libascendcl.so", *tree.OTHER_NAMES}
    assert {path.resolve().name for path in (home / "lib64").iterdir()} == {"libascendcl.so"}


def test_the_library_exports_the_interface_and_nothing_else(home: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", home / "lib64" / "libascendcl.so"], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert {function.name for function in tree.read_headers()} <= exported
    assert all(name.startswith(("acl", "PyInit__normgrad_sdk")) for name in exported), exported


def test_the_command_makes_the_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sdk", str(tmp_path / "tree")]) == 0
    assert main(["sdk", str(tmp_path / "tree")]) == 0  # over the old one
    assert f"\nsource {tmp_path}/tree/set_env.sh\n" in capsys.readouterr().out
    assert (tmp_path / "tree" / "lib64" / "libopapi.so").exists()


def test_the_hint_can_be_pasted_into_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sdk", str(tmp_path / "it's a tree")]) == 0
    hint = capsys.readouterr().out.splitlines()[-1]
    script = f'{hint}; printf %s "$ASCEND_HOME_PATH"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}/it's a tree"


# Files that are not normgrad's


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file by its path, and where every link leads."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["sdk", str(directory)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing was changed" in err
    return err


def cann_tree(home: Path) -> Path:
    for name in ("lib64/libascendcl.so", "lib64/libopapi.so", "include/acl/acl.h", "set_env.sh"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("REAL CANN")
    return home


def test_a_cann_tree_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cann_tree(tmp_path / "8.0")
    before = contents(tmp_path)
    assert f"{tmp_path}/8.0/" in refused(tmp_path / "8.0", capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "foreign",
    [
        "set_env.sh",
        "include/acl/acl.h",
        "include/aclnnop/aclnn_layer_norm.h",
        "lib64/libascendcl.so",
        "lib64/libopapi.so",
    ],
)
def test_a_single_foreign_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign: str) -> None:
    (tmp_path / foreign).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / foreign).write_text("mine")
    before = contents(tmp_path)
    assert f"{tmp_path}/{foreign}: is not normgrad's" in refused(tmp_path, capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("of", ["files", "folders"])
def test_nothing_is_written_through_symbolic_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of: str, home: Path
) -> None:
    """As in CANN's ``latest``; not even to a tree that normgrad wrote."""
    (tmp_path / "latest").mkdir()
    shutil.copytree(home, tmp_path / "8.0", symlinks=True)
    for path in (tmp_path / "8.0").iterdir() if of == "folders" else (tmp_path / "8.0").rglob("*.*"):
        link = tmp_path / "latest" / path.relative_to(tmp_path / "8.0")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    before = contents(tmp_path)
    assert "is a symbolic link" in refused(tmp_path / "latest", capsys)
    assert contents(tmp_path) == before


def test_a_link_that_leads_nowhere_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set_env.sh").symlink_to(tmp_path / "nowhere")
    assert f"{tmp_path}/set_env.sh: is a symbolic link" in refused(tmp_path, capsys)
    assert not (tmp_path / "nowhere").exists()


def test_a_tree_is_updated_and_what_else_is_there_stays(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "tree"
    shutil.copytree(home, target, symlinks=True)
    (target / "notes.txt").write_text("mine")
    (target / "include" / "acl" / "mine.h").write_text("mine")
    header, first_line = target / "include" / "acl" / "acl.h", (home / "include/acl/acl.h").read_text().splitlines()[0]
    header.write_text(f"{first_line}\n/* of an older version */\n")
    links = {path: path.lstat().st_mtime_ns for path in (target / "lib64").iterdir() if path.is_symlink()}
    assert sdk.build(target) == target
    assert {path: path.lstat().st_mtime_ns for path in links} == links, "a program may start meanwhile"
    assert header.read_bytes() == (home / "include/acl/acl.h").read_bytes()
    assert (target / "notes.txt").read_text() == (target / "include/acl/mine.h").read_text() == "mine"
    assert not [path for path in target.rglob("*") if path.name.startswith(".normgrad-")]


# Where it cannot be created


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(sdk.SdkError, match=r"no C compiler was found \(cc, gcc or clang\); install one"):
        sdk.build(tmp_path / "tree")
    assert main(["sdk", str(tmp_path / "tree")]) == 2
    assert capsys.readouterr().err.startswith("normgrad: no C compiler was found")
    assert not (tmp_path / "tree").exists()


def test_compiler_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(sdk.SdkError, match="the C compiler that CC names, 'no-such-compiler -m64', is not there"):
        sdk.build(tmp_path / "tree")


def test_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", "-std=no_such_standard")
    with pytest.raises(sdk.SdkError, match=r"(?s)the C compiler failed:\n.*no_such_standard"):
        sdk.build(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_compiler_whose_message_is_not_in_the_locale_s_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'ung\\374ltig' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(sdk.SdkError, match=r"(?s)the C compiler failed:\n.*ung.*ltig"):
        sdk.build(tmp_path / "tree")


@pytest.mark.parametrize("soname", ["libpython3.99.a", "libpython3.99.so.1.0"])
def test_no_shared_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soname: str) -> None:
    real = sysconfig.get_config_var
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: soname if name == "INSTSONAME" else real(name))
    with pytest.raises(sdk.SdkError, match="has no shared libpython, which the library needs; use a Python built with"):
        sdk.build(tmp_path / "tree")


def test_no_python_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(sdk.SdkError, match="Python's headers are not in"):
        sdk.build(tmp_path / "tree")


def test_no_cffi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cffi", None)
    with pytest.raises(sdk.SdkError, match=r"cffi is not installed; pip install 'normgrad\[sdk\]'"):
        sdk.build(tmp_path / "tree")


def test_a_directory_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert f"normgrad: {tmp_path}/file: is not a folder" in refused(tmp_path / "file", capsys)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "lib64").write_text("")
    assert f"normgrad: {tmp_path}/tree/lib64: is not a folder" in refused(tmp_path / "tree", capsys)
    assert list((tmp_path / "tree").iterdir()) == [tmp_path / "tree" / "lib64"]
    assert main(["sdk", "/proc/x"]) == 2
    assert capsys.readouterr().err == "normgrad: /proc/x: cannot be written: No such file or directory\n"


def test_a_cffi_without_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cffi", types.SimpleNamespace(FFI=object, __version__="9.0"))
    with pytest.raises(sdk.SdkError, match=r"^cffi 9\.0 cannot write the library's source \(AttributeError: .*\)"):
        sdk.build(tmp_path / "sdk")
    assert not (tmp_path / "sdk").exists()
