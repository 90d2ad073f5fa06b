"""Files of named arrays: what is written is read back to the bit, and hostile files are one error, never a crash."""

import contextlib
import io
import json
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normgrad.cli import files
from normgrad.cli.errors import BadInput

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SUFFIXES = (".npz", ".safetensors", ".pt")
NEEDS = {".safetensors": "safetensors", ".pt": "torch"}


@pytest.fixture(params=SUFFIXES, scope="module")
def suffix(request):
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return request.param


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def safetensors_numpy():
    return pytest.importorskip("safetensors.numpy")


class Evil:
    """An object whose unpickling leaves a trace."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


dtypes = st.sampled_from([np.dtype(d) for d in ("f4", "f2", "f8", "i4", "i8", "u1", "bool")] + [BFLOAT16])
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
names = st.sampled_from(["grad_input", "grad_weight", "mean", "running_var"])


@st.composite
def arrays(draw):
    dtype, shape = draw(dtypes), draw(shapes)
    size = int(np.prod(shape, dtype=int))
    if dtype.kind == "b":
        return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool).reshape(shape)
    data = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    array = np.frombuffer(data, np.uint8).view(dtype).reshape(shape) if size else np.empty(shape, dtype)
    return array.T if draw(st.booleans()) else array


@given(content=st.dictionaries(names, arrays(), max_size=4))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back_to_the_bit(suffix, tmp_path_factory, content):
    path = tmp_path_factory.mktemp("files") / f"arrays{suffix}"
    files.write(path, content)
    found = files.read(path)
    assert set(found) == set(content)
    for name, array in content.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", BFLOAT16])
def test_dtypes_keep_their_names(suffix, tmp_path, dtype):
    path = tmp_path / f"x{suffix}"
    files.write(path, {"input": np.arange(3).astype(dtype)})
    assert files.read(path)["input"].dtype == dtype


def test_the_suffix_is_taken_in_any_case(tmp_path):
    files.write(tmp_path / "X.NPZ", {"mean": np.ones(1, np.float32)})
    assert files.read(tmp_path / "X.NPZ")["mean"] == 1


# bfloat16 in .npz


@pytest.mark.parametrize("stored", ["V2", "uint16"])
def test_npz_lists_its_arrays_of_bfloat16(tmp_path, stored):
    x = np.array([1.5, -2], BFLOAT16)
    np.savez(tmp_path / "x.npz", input=x.view(stored), mean=np.ones(1, np.float32), bfloat16=["input"])
    found = files.read(tmp_path / "x.npz")
    assert set(found) == {"input", "mean"}
    assert found["input"].dtype == BFLOAT16
    assert found["input"].tolist() == [1.5, -2]


def test_npz_as_numpy_itself_saves_bfloat16(tmp_path):
    np.savez(tmp_path / "x.npz", input=np.array([3], BFLOAT16))
    assert files.read(tmp_path / "x.npz")["input"].dtype == BFLOAT16


def test_npz_written_here_can_be_read_with_numpy_alone(tmp_path):
    files.write(tmp_path / "x.npz", {"mean": np.ones(1, np.float32), "grad_bias": np.array([3], BFLOAT16)})
    with np.load(tmp_path / "x.npz", allow_pickle=False) as archive:
        assert archive["bfloat16"].tolist() == ["grad_bias"]
        assert archive["grad_bias"].view(BFLOAT16).tolist() == [3]
    files.write(tmp_path / "y.npz", {"mean": np.ones(1, np.float32)})
    with np.load(tmp_path / "y.npz") as archive:
        assert archive.files == ["mean"]


def test_uint16_that_is_not_listed_stays_so(tmp_path):
    np.savez(tmp_path / "x.npz", input=np.ones(1, np.uint16))
    assert files.read(tmp_path / "x.npz")["input"].dtype == np.uint16


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"x": np.ones(1, np.float32), "bfloat16": ["x"]}, "x is listed as bfloat16, .* and is float32"),
        ({"x": np.ones(1, np.float32), "bfloat16": ["y"]}, "lists y, which the file does not hold"),
        ({"x": np.ones(1, np.float32), "bfloat16": [1]}, "must list names of arrays, and holds int64"),
    ],
)
def test_npz_whose_list_is_wrong(tmp_path, entries, text):
    np.savez(tmp_path / "x.npz", **{k: v if k == "x" else np.array(v) for k, v in entries.items()})
    with pytest.raises(BadInput, match=text):
        files.read(tmp_path / "x.npz")


def test_npz_of_the_other_byte_order(tmp_path):
    np.savez(tmp_path / "x.npz", input=np.array([1, 2], ">f4"))
    found = files.read(tmp_path / "x.npz")["input"]
    assert found.dtype == np.float32
    assert found.dtype.isnative
    assert found.tolist() == [1, 2]


# Attributes


def test_safetensors_holds_attributes_in_its_metadata(tmp_path, safetensors_numpy):
    metadata = {"eps": "1e-3", "normalized_shape": "[4, 8]", "output_mask": "[true, false, true]", "format": "pt"}
    safetensors_numpy.save_file({"mean": np.ones(1, np.float32)}, tmp_path / "x.safetensors", metadata)
    found = files.read(tmp_path / "x.safetensors")
    del found["mean"]
    assert found == {"eps": 1e-3, "normalized_shape": [4, 8], "output_mask": [True, False, True]}


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"eps": "1e-3x"}, "eps is '1e-3x' in the metadata, and must be a JSON value"),
        ({"mean": "1"}, "holds mean both as a tensor and in the metadata"),
    ],
)
def test_safetensors_whose_metadata_is_wrong(tmp_path, safetensors_numpy, metadata, text):
    safetensors_numpy.save_file({"mean": np.ones(1, np.float32)}, tmp_path / "x.safetensors", metadata)
    with pytest.raises(BadInput, match=text):
        files.read(tmp_path / "x.safetensors")


def test_pt_holds_plain_values_beside_tensors(tmp_path, torch):
    content = {"N": 2, "eps": 1e-3, "normalized_shape": torch.Size([4]), "output_mask": (True, False), "weight": None}
    torch.save({**content, "mean": torch.ones(2, requires_grad=True)}, tmp_path / "x.pt")
    found = files.read(tmp_path / "x.pt")
    assert found.pop("mean").tolist() == [1, 1]
    assert found == content


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda torch: [torch.ones(1)], "must hold a dictionary with parameter names as keys"),
        (lambda torch: {1: torch.ones(1)}, "must hold a dictionary with parameter names as keys"),
        (lambda torch: {"x": torch.eye(2).to_sparse()}, "x is a tensor of layout torch.sparse_coo"),
        (lambda torch: {"x": torch.ones(1, device="meta")}, "x is a tensor on the device meta, which has no data"),
        (lambda torch: {"x": torch.ones(1).to(torch.float8_e4m3fn)}, "x is torch.float8_e4m3fn, which has no NumPy"),
    ],
)
def test_pt_with_what_no_operator_takes(tmp_path, torch, make, text):
    torch.save(make(torch), tmp_path / "x.pt")
    with pytest.raises(BadInput, match=text):
        files.read(tmp_path / "x.pt")


# Hostile files


def refused(path: Path) -> str:
    """The one line that a file is refused with."""
    with pytest.raises(BadInput) as raised:
        files.read(path)
    text = str(raised.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text


def test_a_pickle_is_never_loaded(suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 4):
        path = tmp_path / f"evil{suffix}"
        path.write_bytes(pickle.dumps(Evil(), protocol))
        refused(path)
        assert not Path("unpickled").exists()


def test_npz_with_pickled_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "evil.npz", input=np.array([Evil()], object))
    assert "pickled objects, and those are never loaded" in refused(tmp_path / "evil.npz")
    assert not Path("unpickled").exists()


def test_npz_with_a_header_that_is_too_long(tmp_path):
    header = b"[" * 5000 + b"]" * 5000 + b"\n"
    with zipfile.ZipFile(tmp_path / "long.npz", "w") as archive:
        archive.writestr("input.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header)
    assert refused(tmp_path / "long.npz").endswith("an array's header is too long")


def test_pt_with_pickled_objects(tmp_path, monkeypatch, torch):
    monkeypatch.chdir(tmp_path)
    torch.save({"input": Evil()}, tmp_path / "evil.pt")
    assert "never loaded" in refused(tmp_path / "evil.pt")
    assert not Path("unpickled").exists()


@pytest.mark.parametrize("content", [b"hello", b"PK", b"\x89PNG", b"{}"])
def test_npz_that_is_no_archive(tmp_path, content):
    (tmp_path / "x.npz").write_bytes(content)
    assert "is not a valid .npz file: it is not an archive" in refused(tmp_path / "x.npz")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG", b"{}"])
def test_pt_that_is_no_archive(tmp_path, content, torch):
    (tmp_path / "x.pt").write_bytes(content)
    assert refused(tmp_path / "x.pt").endswith("is not a valid .pt file: it is not an archive (torch.save writes one)")


def test_pt_that_is_cut_off(tmp_path, torch):
    content = written(".pt", tmp_path)
    (tmp_path / "x.pt").write_bytes(content[: len(content) // 2])
    assert refused(tmp_path / "x.pt").endswith("is not a valid .pt file: its archive is damaged or incomplete")


def test_npz_entries_are_unpacked_once_their_names_are_accepted(tmp_path, monkeypatch):
    np.savez(tmp_path / "x.npz", input=np.ones(3), unwanted=np.ones(4))
    unpacked = []
    read = np.lib.format.read_array
    monkeypatch.setattr(np.lib.format, "read_array", lambda *args, **more: unpacked.append(1) or read(*args, **more))

    def accept(names):
        assert sorted(names) == ["input", "unwanted"]
        raise BadInput("unwanted")

    with pytest.raises(BadInput, match=r"x.npz: unwanted"):
        files.read(tmp_path / "x.npz", accept)
    assert not unpacked
    assert sorted(files.read(tmp_path / "x.npz", sorted)) == ["input", "unwanted"]
    assert len(unpacked) == 2


def test_empty_files(suffix, tmp_path):
    path = tmp_path / f"empty{suffix}"
    path.touch()
    assert "is not a valid" in refused(path)


def written(suffix, folder) -> bytes:
    path = folder / f"sound{suffix}"
    files.write(path, {"input": np.arange(40, dtype=np.float32), "mean": np.ones(3, BFLOAT16)})
    return path.read_bytes()


def test_truncated_files(suffix, tmp_path):
    content = written(suffix, tmp_path)
    path = tmp_path / f"short{suffix}"
    for length in range(1, len(content), max(1, len(content) // 40)):
        path.write_bytes(content[:length])
        refused(path)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_files_with_some_bytes_changed(suffix, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("changed")
    content = bytearray(written(suffix, folder))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = folder / f"changed{suffix}"
    path.write_bytes(content)
    with contextlib.suppress(BadInput):  # a changed value may go unnoticed; nothing else may be raised
        files.read(path)


@given(content=st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_files_of_noise(suffix, tmp_path_factory, content):
    path = tmp_path_factory.mktemp("noise") / f"noise{suffix}"
    path.write_bytes(content)
    refused(path)


def test_safetensors_with_a_huge_header(tmp_path, safetensors_numpy):
    path = tmp_path / "huge.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert "header" in refused(path)


def test_safetensors_whose_tensor_reaches_past_the_end(tmp_path, safetensors_numpy):
    header = json.dumps({"input": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    path = tmp_path / "past.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    refused(path)


def test_safetensors_of_a_dtype_that_nothing_takes(tmp_path, safetensors_numpy):
    header = json.dumps({"input": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "float8.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    assert "input is of type F8_E4M3, and must be one of F64" in refused(path)


def npz_with(path: Path, *entries: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return path


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header.encode()


def test_npz_with_a_huge_header(tmp_path):
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + " " * 50_000 + "\n"
    refused(npz_with(tmp_path / "x.npz", ("input.npy", npy(header) + b"1234")))


def test_npz_that_says_it_is_larger_than_any_memory(tmp_path):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**60},)}}\n"
    assert "more than there is memory for" in refused(npz_with(tmp_path / "x.npz", ("input.npy", npy(header))))


def test_npz_with_something_that_is_no_array(tmp_path):
    assert "readme is not an array" in refused(npz_with(tmp_path / "x.npz", ("readme", b"hello")))


def test_npz_with_two_entries_of_one_name(tmp_path):
    one = io.BytesIO()
    np.save(one, np.ones(1, np.float32))
    entries = (("input.npy", one.getvalue()), ("input", one.getvalue()))
    assert "two entries of one name" in refused(npz_with(tmp_path / "x.npz", *entries))


def test_npz_that_is_a_single_array(tmp_path):
    with (tmp_path / "x.npz").open("wb") as stream:
        np.save(stream, np.ones(2))
    assert "is a single array" in refused(tmp_path / "x.npz")


# Paths


def test_other_suffixes(tmp_path):
    for name in ("x.txt", "npz", "x.npz.gz"):
        with pytest.raises(BadInput, match=r"must end in \.npz, \.safetensors or \.pt"):
            files.read(tmp_path / name)


def test_a_file_that_is_not_there_and_a_folder(suffix, tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path / f"none{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    assert "is a folder" in refused(tmp_path / f"folder{suffix}")


@pytest.mark.parametrize(("name", "extra"), [("x.safetensors", "files"), ("x.pt", "torch")])
def test_a_missing_library_names_its_extra(tmp_path, monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, NEEDS[Path(name).suffix], None)
    for use in (files.read, files.check_writable):
        with pytest.raises(BadInput, match=rf"pip install 'normgrad\[{extra}\]'"):
            use(tmp_path / name)


def test_writing_where_no_file_can_be(suffix, tmp_path):
    one = {"mean": np.ones(1, np.float32)}
    with pytest.raises(BadInput, match="there is no folder"):
        files.write(tmp_path / "none" / f"x{suffix}", one)
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(BadInput, match="is not a file"):
        files.write(tmp_path / f"folder{suffix}", one)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(suffix, tmp_path, monkeypatch, error):
    def fails_halfway(stream, arrays):
        stream.write(b"half")
        raise error

    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"old")
    monkeypatch.setattr(files.FORMATS[suffix], "save", fails_halfway)
    with pytest.raises(BadInput, match="cannot be written"):
        files.write(path, {"mean": np.ones(1, np.float32)})
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(stream, arrays):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.FORMATS[".npz"], "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "x.npz", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="names have other limits there")
def test_the_longest_name_that_a_file_can_have(suffix, tmp_path):
    longest = "x" * (255 - len(suffix)) + suffix
    files.write(tmp_path / longest, {"mean": np.ones(1, np.float32)})
    assert files.read(tmp_path / longest)["mean"] == 1
    for use in (files.read, files.check_writable):
        with pytest.raises(BadInput, match="File name too long") as raised:
            use(tmp_path / f"x{longest}")
        assert str(raised.value).startswith(f"{tmp_path / f'x{longest}'}: cannot be ")


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_stays_a_link(tmp_path):
    link, target = tmp_path / "link.npz", tmp_path / "target.npz"
    link.symlink_to(target)
    files.write(link, {"mean": np.ones(1, np.float32)})
    assert link.is_symlink()
    assert files.read(target)["mean"] == 1


@pytest.mark.skipif(os.name == "nt", reason="no permission bits there")
def test_the_file_has_the_permissions_of_any_new_file(tmp_path):
    files.write(tmp_path / "x.npz", {})
    (tmp_path / "other").touch()
    assert (tmp_path / "x.npz").stat().st_mode == (tmp_path / "other").stat().st_mode
