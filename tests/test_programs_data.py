"""Data files of FLEQ programs: what is read, and that no file crashes the assembler."""

import io
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.programs.fleq_program import as_matrix
from looped.programs.fleq_text import assemble_fleq, read_fleq
from looped.programs.source import ProgramError


def test_data_files_are_read_beside_the_program(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6.0).reshape(2, 3))
    (tmp_path / "b.csv").write_text("1,2\n3.5,-4\n")
    path = tmp_path / "p.fleq"
    path.write_text("let A = a.npy\nlet B = b.csv\nmm C, B, A\nhalt")
    program = read_fleq(path)
    assert (program.value("A", program.memory) == np.arange(6).reshape(2, 3)).all()
    assert (program.value("B", program.memory) == [[1, 2], [3.5, -4]]).all()
    for dtype in (np.int8, np.uint64, np.float32, ">f8"):
        np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3).astype(dtype))
        assert (read_fleq(path).value("A", program.memory) == np.arange(6).reshape(2, 3)).all()


def npy(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


FILES = [
    ("a.csv", b"1,2\n3,x\n", "holds no matrix: could not convert"),
    ("a.csv", b"1,2\n3\n", "holds no matrix: its rows differ in length"),
    ("a.csv", b"1," + b"0" * 131_073, r"holds no matrix: field larger than field limit \(131072\)"),
    ("a.csv", b"\xff1", "holds no matrix: .* codec can't decode"),
    ("a.csv", b"", "has shape 1 x 0"),
    ("a.csv", b"1,nan", "holds NaN or infinity"),
    ("a.npy", npy(np.array([np.nan])), "holds NaN or infinity"),
    ("a.npy", npy(np.array([1 + 2j])), "holds complex numbers; a matrix has real ones"),
    ("a.npy", npy(np.array(["1"])), "is no matrix of numbers"),
    ("a.npy", npy(np.array([{}])), "holds no matrix: Object arrays cannot be loaded"),
    ("a.npy", npy(np.zeros((2, 2, 2))), "has shape 2 x 2 x 2"),
    ("a.npy", npy(np.zeros((65, 1))), "is 65 x 1; matrices have at most 64"),
    ("a.npy", npy(np.zeros((2, 2)))[:-1], "holds no matrix"),
    ("a.npy", npy(np.zeros((2, 2))).replace(b"(2, 2)", b"(2, 2 "), "holds no matrix"),
    ("a.npy", npy(np.zeros((2, 2))).replace(b"(2, 2)", b"9**9e9"), "holds no matrix"),
    ("a.npy", b"PK\x03\x04", "holds no matrix"),
    ("a.npy", b"", "holds no matrix"),
    ("a.npy", None, "cannot be read: No such file"),
    ("a.csv", b"1," * 2**23 + b"1", "it has 16,777,217 bytes; at most 16,777,216 are read"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=range(len(FILES)))
def test_files_that_hold_no_matrix_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ProgramError, match=f"p:1:9: .*{name} .*{message}|p:1:9: {name} .*{message}"):
        assemble_fleq(f"let A = {name}\nhalt", name="p", folder=tmp_path)


NOT_MATRICES = [[[1, 2], [3]], None, "5", {"a": 1}, [1j], np.array([1j]), [10**400], [[None]], np.array(["a"]), object()]


@pytest.mark.parametrize("given", NOT_MATRICES, ids=range(len(NOT_MATRICES)))
def test_what_is_no_matrix_of_real_numbers_is_refused(given):
    with pytest.raises(ValueError, match=r"p: A (is no matrix of numbers|holds complex numbers|holds NaN)"):
        assemble_fleq("let A = 1\nhalt", name="p").with_values({"A": given})
    assert as_matrix([10**2, 1.5], "x").tolist() == [[100, 1.5]]


SEEDS = [np.arange(6.0).reshape(2, 3), np.arange(4, dtype=np.int32), np.array([1j]), np.zeros(2, dtype=[("a", "f4")])]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_data_file_crashes_the_assembler(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(npy(data.draw(st.sampled_from(SEEDS))))
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"(", b"'", b"}", b"-"])
        )
    table = data.draw(st.text(alphabet='0123456789.,-e"\n\r \x00naif;', max_size=40) | st.text(max_size=20))
    (folder / "fuzz.npy").write_bytes(
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    (folder / "fuzz.csv").write_bytes(table.encode(errors="surrogatepass"))
    for name in ("fuzz.npy", "fuzz.csv"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy warns of odd headers
                assemble_fleq(f"let A = {name}\nhalt", folder=folder)
        except ProgramError as error:
            assert (error.place.line, error.place.column) == (1, 9)  # noqa: PT017
