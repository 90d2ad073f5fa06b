"""The full report: patterns, worst elements, quantiles; on inputs that the generator makes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad import ContractError
from normgrad.contract.dtypes import numpy_dtype
from normgrad.operators import OPERATORS
from normgrad.reference import rounded
from normgrad.testing import Judgement, compare, judge, oracle, terms
from normgrad.testing.anatomy import anatomy
from normgrad.testing.cases import TestCase, make_cases
from normgrad.testing.clusters import Cluster, clusters
from normgrad.testing.expected import checked, exact_results, results_of
from normgrad.testing.layout import Layout, layout_of
from normgrad.testing.measured import Measured
from normgrad.testing.page import Origin, not_judged, page, section
from normgrad.testing.page_style import CSS, TEXT_ON, THEMES
from normgrad.testing.terms import Magnitude

ORIGIN = Origin("normgrad 1.2.3", "2026-01-31T12:00:00+00:00", "normgrad check <op> in out")


def right_results(case: TestCase) -> dict[str, np.ndarray]:
    """The exact results, rounded once."""
    operator = OPERATORS[case.operator]
    call = checked(operator, case.arguments, None)
    exact = exact_results(operator, call)
    found = {}
    for tensor in results_of(operator, call):
        given = case.arguments.get(tensor.name)
        moved = tensor.name.startswith("running")
        dtype = given.dtype if moved else numpy_dtype(tensor.dtype(call).allowed[0])
        found[tensor.name] = rounded(exact[tensor.name], dtype)
    return found


def one_case(operator: str, kind: str = "normal", dtype: str = "float32") -> TestCase:
    return next(case for case in make_cases(operator, kinds=[kind]) if case.name.endswith(f"-{dtype}"))


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_rounded_once_passes_on_every_case(operator: str) -> None:
    for case in make_cases(operator):
        judgement = judge(operator, case.arguments, right_results(case))
        assert judgement, [(case.name, output.report.text) for output in judgement.outputs]
        for output in judgement.outputs:
            assert output.errors.rounded == 1
            assert output.errors.clusters == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_cases_as_numpy_loads_them(operator: str, tmp_path: Path) -> None:
    """Attributes are then arrays without axes."""
    case = one_case(operator)
    np.savez(tmp_path / "case.npz", **{name: value for name, value in case.arguments.items() if value is not None})
    with np.load(tmp_path / "case.npz") as archive:
        assert judge(operator, dict(archive), right_results(case))


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_terms_of_the_worst_elements_add_up(operator: str) -> None:
    """Those of a linear formula sum to the exact value; those of a deviation to its variance."""
    case = one_case(operator)
    results = right_results(case)
    for name in results:
        broken = dict(results)
        broken[name] = np.asarray(results[name] * np.float32(1.5))
        element = next(o for o in judge(operator, case.arguments, broken).outputs if o.name == name).errors.worst[0]
        total = math.fsum(value for term, value in element.terms.items() if not term.startswith("largest"))
        if name in ("rstd", "invstd", "invstd_all"):
            total = 1 / math.sqrt(total)
        assert math.isclose(total, element.exact, rel_tol=1e-9, abs_tol=1e-9 * element.total)
        for given, value in element.inputs.items():
            if given != "n":
                assert value in np.asarray(case.arguments.get(given, value), np.float64) or given not in case.arguments


def test_inputs_are_those_at_the_place() -> None:
    case = one_case("group_norm_backward")
    results = right_results(case)
    results["grad_input"][2, 13, 4, 5] += 1
    (element, *_) = judge("group_norm_backward", case.arguments, results).outputs[0].errors.worst
    assert element.index == (2, 13, 4, 5)
    for name in ("grad_out", "input"):
        assert element.inputs[name] == case.arguments[name][2, 13, 4, 5]
    assert element.inputs["weight"] == case.arguments["weight"][13]
    assert element.inputs["mean"] == case.arguments["mean"].reshape(3, 4)[2, 13 // 6]


def test_the_worst_elements_have_their_error_scales() -> None:
    case = one_case("layer_norm_backward")
    results = right_results(case)
    results["grad_input"].flat[700] += 1
    judgement = judge("layer_norm_backward", case.arguments, results)
    (element, *_) = judgement.outputs[0].errors.worst
    magnitude, *_ = terms.layer_norm_backward(**case.arguments)
    assert element.total == magnitude.total[element.index]
    assert element.underflow == magnitude.underflow[element.index] > 0
    assert judgement.as_json()["outputs"][0]["errors"]["worst"][0]["underflow"] == element.underflow
    text = page("title", "", [section(case.name, judgement, with_plots=False)], ORIGIN)
    assert f"<td class=n>{element.total:.4g}</td><td class=n>{element.underflow:.4g}</td>" in text


def patterns(shape: tuple[int, int], wrong: object, row: str = "row", **more: int) -> list[tuple[str, str]]:
    """The patterns of a result of rows with wrong elements at an index."""
    is_wrong = np.zeros(shape, bool)
    is_wrong[wrong] = True
    layout = Layout(shape[1], **({"channels": shape[1]} | more), row_is=row)
    return [(cluster.kind, cluster.text) for cluster in clusters(is_wrong, layout)]


def test_rows() -> None:
    assert patterns((64, 100), np.s_[5:8]) == [("row", "in 3 of 64 rows: 5–7")]
    assert patterns((64, 100), np.s_[63, :40]) == [
        ("row", "in row 63 of 64"),
        ("column", "in 40 of 100 columns: 0–39"),
    ]


def test_rows_are_named_to_the_last_one() -> None:
    assert patterns((64, 64), np.s_[20:40]) == [("row", "in 20 of 64 rows: 20–39")]
    some = [3, 10, 17, 20, 29, 30, 31, 45, 50, 62]
    assert patterns((64, 64), np.s_[some]) == [("row", "in 10 of 64 rows: 3, 10, 17, 20, 29–31, …, 62")]


def test_rows_that_repeat() -> None:
    assert patterns((64, 100), np.s_[np.arange(64) % 3 > 0]) == [("row", "in 42 of 64 rows: rows 1–2 of every 3")]
    assert patterns((64, 100), np.s_[5::16]) == [("row", "in 4 of 64 rows: row 5 of every 16")]


def test_all_rows_but_some() -> None:
    is_wrong = np.ones(64, bool)
    is_wrong[[4, 20, 33]] = False
    assert patterns((64, 100), np.s_[is_wrong]) == [("row", "in 61 of 64 rows: all but rows 4, 20, 33")]


def test_a_pattern_of_most_says_so() -> None:
    is_wrong = np.zeros((64, 100), bool)
    is_wrong[20] = True
    is_wrong[np.arange(0, 60, 6), np.arange(10, 70, 6)] = True
    assert patterns((64, 100), np.s_[is_wrong]) == [("row", "100 of the 110 wrong elements are in row 20 of 64")]


def test_channels_and_columns() -> None:
    """LayerNorm has rows and columns; the others have samples and channels, in two dimensions too."""
    assert patterns((64, 100), np.s_[:, [3, 40]]) == [("column", "in 2 of 100 columns: 3, 40")]
    assert patterns((64, 100), np.s_[:, [3, 40]], "channel") == [("channel", "in 2 of 100 channels: 3, 40")]
    assert patterns((64, 100), np.s_[5:8], "channel") == [("sample", "in 3 of 64 samples: 5–7")]
    assert patterns((64, 100), np.s_[:, 1:]) == [("column", "in 99 of 100 columns: all but column 0")]
    assert patterns((8, 60), np.s_[:, 12:24], "group", channels=5, positions=12) == [("channel", "in channel 1 of 5")]
    # As in BatchNorm, whose rows are a sample's channels: two channels are also twelve rows.
    rows = (np.arange(114) % 19 == 1) | (np.arange(114) % 19 == 2)
    assert patterns((114, 77), np.s_[rows], "channel", channels=19, positions=77) == [
        ("channel", "in 2 of 19 channels: 1–2")
    ]


def test_samples() -> None:
    assert patterns((114, 77), np.s_[:19], "channel", channels=19, positions=77) == [("sample", "in sample 0 of 6")]
    assert patterns((12, 60), np.s_[4:8], "group", channels=20, positions=12) == [("sample", "in sample 1 of 3")]


def test_one_channel_of_one_sample() -> None:
    """A row of GroupNorm holds several channels."""
    assert patterns((12, 60), np.s_[7, 12:24], "group", channels=20, positions=12) == [
        ("channel", "in channel 16 of 20"),
        ("sample", "in sample 1 of 3"),
    ]


def test_groups() -> None:
    """Of all samples, of one sample, and in the order of a kernel's work, which is by sample and group."""
    sizes = {"row": "group", "channels": 20, "positions": 12}
    assert patterns((12, 60), np.s_[1::4], **sizes) == [("group", "in group 1 of 4")]
    assert patterns((12, 60), np.s_[7], **sizes) == [("group", "in group 3 of 4"), ("sample", "in sample 1 of 3")]
    assert patterns((12, 60), np.s_[[3, 7]], **sizes) == [
        ("group", "in group 3 of 4"),
        ("sample", "in 2 of 3 samples: 0–1"),
    ]
    assert patterns((12, 60), np.s_[2:7], **sizes) == [("row", "in 5 of 12 rows: 2–6 (a row is a group of a sample)")]
    assert patterns((12, 60), np.s_[:, -7:], **sizes) == [("tail", "in the last 7 of the 60 elements of groups")]
    assert patterns((4, 60), np.s_[2], **sizes) == [("group", "in group 2 of 4")]
    # A group of one channel is that channel.
    assert patterns((12, 60), np.s_[1::4], "group", channels=4, positions=60) == [("channel", "in channel 1 of 4")]


def test_statistics_of_group_norm_have_samples_and_groups() -> None:
    """Though N·group may be C, the number of elements of a weight's gradient."""
    arguments = {"input": np.zeros((4, 24, 5)), "N": 4, "C": 24, "HxW": 5, "group": 6}
    layout = layout_of(arguments, 4 * 6)
    is_wrong = np.zeros((4, 6), bool)
    is_wrong[:, 2] = True
    assert clusters(is_wrong, layout) == [Cluster("group", "in group 2 of 6")]
    assert layout_of({**arguments, "grad_out": arguments["input"]}, 24) == Layout(24)

    def stale(results: dict[str, np.ndarray]) -> None:
        results["rstd"][1] = results["rstd"][0]
        results["mean"] = results["mean"][:, ::-1].copy()

    found = found_in("group_norm", stale)
    assert found["copy"] == "sample 1 has the results of sample 0"
    assert found["swap"].endswith("groups are in reverse order")


def test_a_row_of_batch_norm_is_explained() -> None:
    found = patterns((120, 63), np.s_[18:22], "channel", channels=20, positions=63)
    assert found == [("row", "in 4 of 120 rows: 18–21 (a row is a channel of a sample)")]


def test_tails() -> None:
    assert patterns((64, 100), np.s_[:, 96:]) == [
        ("tail", "in the last 4 of the 100 elements of rows, the remainder after blocks of 8 to 32")
    ]
    assert patterns((64, 513), np.s_[:, 512:])[0][1].startswith("in the last of the 513 elements of rows")
    assert patterns((64, 90), np.s_[5:8, 83:]) == [
        ("row", "in 3 of 64 rows: 5–7"),
        ("tail", "in the last 7 of the 90 elements of rows"),
    ]


def test_an_unknown_operator() -> None:
    with pytest.raises(ValueError, match="unknown operator 'batch_norm'; known are layer_norm_backward, "):
        judge("batch_norm", {}, {})


def test_tails_of_planes() -> None:
    """As a kernel leaves them that has no mask for HxW."""
    is_wrong = np.zeros((3, 24, 187), bool)
    is_wrong[..., -3:] = True
    text = "in the last 3 of the 187 positions (HxW) of channels, the remainder after blocks of 4 to 8"
    assert patterns((12, 1122), np.s_[is_wrong.reshape(12, 1122)], "group", channels=24, positions=187) == [
        ("tail", text)
    ]


def test_tails_of_the_whole_result() -> None:
    is_wrong = np.arange(33 * 515) >= 33 * 515 - 99
    ((kind, text),) = patterns((33, 515), np.s_[is_wrong.reshape(33, 515)])
    assert (kind, text) == (
        "tail",
        "in the last 99 of the 16995 elements of the result, the remainder after blocks of 128 to 512",
    )


def test_the_last_elements_of_a_vector() -> None:
    text = "in the last 3 of the 19 elements, the remainder after blocks of 4 to 16"
    assert patterns((1, 19), np.s_[:, 16:]) == [("tail", text)]
    assert patterns((1, 24), np.s_[:, 21:]) == [("tail", "in the last 3 of the 24 elements")]
    assert patterns((1, 24), np.s_[:, 23:]) == [("single", "1 wrong element, at (0, 23)")]


def test_most_of_a_result_is_no_tail() -> None:
    assert patterns((1, 18), np.s_[:, 1:]) == [("element", "in 17 of 18 elements: all but element 0")]
    is_wrong = np.arange(33 * 515) > 0
    assert patterns((33, 515), np.s_[is_wrong.reshape(33, 515)]) == [("everywhere", "99.9 % of the elements are wrong")]


def test_every_other_element_of_a_short_vector() -> None:
    assert patterns((1, 24), np.s_[:, 1::2]) == [("element", "in 12 of 24 elements: element 1 of every 2")]


def test_a_few_neighbours_in_a_vector() -> None:
    """The channels of one group, say, which chance could make too."""
    is_wrong = np.zeros(24, bool)
    is_wrong[12:18] = True
    text = "in 6 of 24 elements: 12–17"
    assert clusters(is_wrong, Layout(24)) == [Cluster("element", text)]
    assert clusters(is_wrong.reshape(24, 1), Layout(24)) == [Cluster("element", text)]
    text += ", counted in the flattened result"
    assert clusters(is_wrong.reshape(4, 6), Layout(24)) == [Cluster("element", text)]


def test_positions() -> None:
    is_wrong = np.zeros((3, 24, 187), bool)
    is_wrong[..., [5, 70]] = True
    found = patterns((12, 1122), np.s_[is_wrong.reshape(12, 1122)], "group", channels=24, positions=187)
    assert found == [("position", "in 2 of 187 positions: 5, 70")]


@pytest.mark.parametrize("length", [256, 512, 515, 4096])
def test_blocks_are_the_smallest_that_explain_the_pattern(length: int) -> None:
    assert patterns((64, length), np.s_[:, 5::8]) == [("block", "at position 5 of every block of 8 elements of rows")]
    assert patterns((64, length), np.s_[:, ::2]) == [("block", "at position 0 of every block of 2 elements of rows")]


def test_blocks() -> None:
    assert patterns((64, 256), np.s_[:, 7::16]) == [("block", "at position 7 of every block of 16 elements of rows")]
    is_wrong = np.broadcast_to(np.arange(256) % 16 // 2 == 3, (64, 256)) & (
        np.random.default_rng(0).random((64, 256)) < 0.97
    )
    assert patterns((64, 256), np.s_[is_wrong]) == [
        ("block", "at positions 6–7 of 96.9 % of the blocks of 16 elements of rows")
    ]


def test_half_a_row_of_every_other_row_is_no_block_of_two_rows() -> None:
    assert patterns((64, 512), np.s_[::2, 256:]) == [
        ("row", "in 32 of 64 rows: row 0 of every 2"),
        ("tail", "in the last 256 of the 512 elements of rows"),
    ]


def test_a_block_of_several_rows_where_nothing_else_explains_the_pattern() -> None:
    rows, columns = np.indices((64, 512))
    assert patterns((64, 512), np.s_[(rows + columns) % 2 == 0])[0][0] == "block"


def test_places_that_are_wrong_in_one_block_only_are_no_block_pattern() -> None:
    offsets = [46, 97, 164, 233 + 256, 12 + 512, 200 + 768]
    assert [kind for kind, _ in patterns((64, 1024), np.s_[:, offsets])] == ["column"]


def test_everywhere_and_nowhere() -> None:
    assert patterns((64, 100), np.s_[:, ::]) == [("everywhere", "all 6400 elements are wrong")]
    assert patterns((64, 100), np.s_[:0]) == []
    is_wrong = np.random.default_rng(0).random((64, 100)) < 0.8
    ((kind, text),) = patterns((64, 100), np.s_[is_wrong])
    assert kind == "everywhere"
    assert text.endswith(" % of the elements are wrong")


def test_whole_rows_of_a_small_result_are_named() -> None:
    """Chance could make them, but no list of elements says it better."""
    assert patterns((5, 3), np.s_[1:3]) == [("row", "in 2 of 5 rows: 1–2")]
    assert patterns((5, 3), np.s_[:, 0]) == [("column", "in column 0 of 3")]
    assert patterns((5, 3), np.s_[4]) == [("row", "in row 4 of 5")]
    assert patterns((2, 6), np.s_[1], "channel") == [("sample", "in sample 1 of 2")]
    assert patterns((5, 3), np.s_[[1, 3, 4]])[0][0] != "row"


def test_a_few_elements_are_named() -> None:
    assert patterns((64, 100), np.s_[3, 5]) == [("single", "1 wrong element, at (3, 5)")]
    assert patterns((64, 100), np.s_[[3, 60], [5, 7]]) == [("scattered", "2 wrong elements, at (3, 5) and (60, 7)")]


def test_a_few_elements_are_named_with_their_pattern() -> None:
    assert patterns((64, 100), np.s_[5, 7:10]) == [
        ("row", "in row 5 of 64; the wrong elements are (5, 7), (5, 8) and (5, 9)")
    ]


def test_an_index_looks_the_same_everywhere() -> None:
    found = found_in("layer_norm_backward", put("grad_weight", 4, 100))
    assert found["single"] == "1 wrong element, at (4,)"


def test_the_guide_explains_every_pattern() -> None:
    kinds = re.findall("``([a-z]+)``", str(Cluster.__doc__))
    assert {"column", "group", "term"} <= set(kinds)
    for guide in ("guides/judging.md", "zh/guides/judging.md"):
        text = (Path(__file__).parents[1] / "docs" / guide).read_text(encoding="utf-8")
        listed = {
            kind for line in text.splitlines() if line.startswith("| `") for kind in re.findall("`([a-z]+)`", line)
        }
        assert set(kinds) <= listed


@pytest.mark.parametrize("count", [2, 5, 50, 500, 2000])
def test_chance_is_no_pattern(count: int) -> None:
    for seed in range(20):
        places = np.random.default_rng(seed).choice(6400, count, replace=False)
        for more in ({}, {"channels": 10, "positions": 10}, {"channels": 5, "positions": 100, "row": "group"}):
            found = patterns((64, 100), np.unravel_index(places, (64, 100)), **more)
            assert [kind for kind, _ in found] == ["scattered"], (seed, found)


def numbers_in(text: str) -> set[int]:
    """The numbers of ``3, 5–7``."""
    ends = (part.partition("–") for part in text.split(", "))
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def random_pattern(random: np.random.Generator, is_wrong: np.ndarray) -> None:
    samples, channels, _ = is_wrong.shape
    match random.integers(6):
        case 0:
            is_wrong[random.integers(samples)] = True
        case 1:
            is_wrong[:, random.integers(channels)] = True
        case 2:
            is_wrong[..., -random.integers(1, 5) :] = True
        case 3:
            is_wrong[random.random(is_wrong.shape) < random.random() ** 3] = True
        case 4:
            is_wrong.reshape(-1)[random.integers(8) :: 8] = True
        case 5:
            is_wrong[random.integers(samples), random.integers(channels)] = True


def test_every_claim_is_true() -> None:
    random, claims = np.random.default_rng(0), 0
    for _ in range(500):
        samples, group, width, positions = (int(n) for n in random.integers(1, (9, 5, 6, 40)))
        is_wrong = np.zeros((samples, group * width, positions), bool)
        for _ in range(random.integers(1, 3)):
            random_pattern(random, is_wrong)
        layout, wrong = Layout(width * positions, group * width, positions, "group"), np.flatnonzero(is_wrong)
        if not wrong.size:
            continue
        (found, *_) = clusters(is_wrong, layout)
        classes = re.match(r"in (?:\d+ of \d+ )?(\w+?)s?:? ([\d–, ]+?)(?: of \d+)?(?: \(|$)", found.text)
        if classes and found.kind != "tail":
            assert set(getattr(layout, classes[1])(wrong).tolist()) == numbers_in(classes[2])
            claims += 1
        if tail := re.match(r"in the last (\d+) of the (\d+)", found.text):
            assert int(tail[2]) - np.min(wrong % int(tail[2])) == int(tail[1])
            claims += 1
    assert claims > 150


# What the wrong elements are


def found_in(
    operator: str, change: Callable[[dict[str, np.ndarray]], object], dtype: str = "float32", kind: str = "normal"
) -> dict[str, str]:
    """The patterns by kind, of all outputs together, where correct results are changed."""
    case = one_case(operator, kind, dtype)
    results = right_results(case)
    change(results)
    judgement = judge(operator, case.arguments, results)
    assert not judgement
    return {cluster.kind: cluster.text for output in judgement.outputs for cluster in output.errors.clusters}


def found_of(judgement: Judgement, name: str) -> dict[str, str]:
    """The patterns of one output by kind."""
    (output,) = (output for output in judgement.outputs if output.name == name)
    return {cluster.kind: cluster.text for cluster in output.errors.clusters}


def scaled(name: str, index: object, factor: float) -> Callable[[dict[str, np.ndarray]], object]:
    def change(results: dict[str, np.ndarray]) -> None:
        results[name][index] = (results[name][index].astype(np.float64) * factor).astype(results[name].dtype)

    return change


def put(name: str, index: object, value: object) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda results: results[name].__setitem__(index, value)


def swapped(name: str, axis: int, one: int, other: int) -> Callable[[dict[str, np.ndarray]], object]:
    def change(results: dict[str, np.ndarray]) -> None:
        order = np.arange(results[name].shape[axis])
        order[[one, other]] = other, one
        results[name] = np.take(results[name], order, axis)

    return change


def test_a_single_nan() -> None:
    assert found_in("layer_norm_backward", put("grad_input", (3, 1, 7), np.nan)) == {
        "single": "1 wrong element, at (3, 1, 7)",
        "special": "1 NaN where a number is right",
    }


def test_special_values_are_counted() -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        results["grad_input"][4] = np.nan
        results["grad_input"][5, 0, :2] = np.inf

    found = found_in("layer_norm_backward", change)
    assert found["special"] == "1545 NaN where numbers are right, 2 Inf where numbers are right"
    assert found["row"] == "1545 of the 1547 wrong elements are in 3 of 33 rows: 12–14"


def test_saturated_results() -> None:
    """As an NPU gives them in its saturating mode, for Inf."""
    case = one_case("layer_norm_backward", dtype="float16")
    case.arguments["rstd"] *= np.float32(1e6)
    results = right_results(case)
    overflowed = np.isinf(results["grad_input"])
    assert np.any(overflowed)
    results["grad_input"] = np.clip(results["grad_input"], -65504, 65504)
    text = f"{np.count_nonzero(overflowed)} numbers where Inf is right, all of them ±65504: the result saturates"
    assert found_of(judge(case.operator, case.arguments, results), "grad_input")["special"] == text


def test_numbers_where_nan_is_right() -> None:
    case = one_case("layer_norm_backward", "special")
    results = right_results(case)
    results["grad_input"][np.isnan(results["grad_input"])] = 1
    (output, *_) = judge("layer_norm_backward", case.arguments, results).outputs
    assert output.errors.clusters[-1].text.endswith(" numbers where NaN or Inf is right")
    assert "the worst finite error is" in output.report.text
    assert "inf" not in output.report.text.partition("; first at")[0]


def test_the_worst_element_is_named_as_what_it_is() -> None:
    """Not as the one that should be Inf, which is another."""
    case = one_case("layer_norm_backward")
    right = right_results(case)
    case.arguments["input"][3, 1, 4] = 3e38
    (output, *_) = judge("layer_norm_backward", case.arguments, right).outputs
    text, worst = output.report.text, output.errors.worst[0]
    assert "; 1 number where Inf is right" in text
    assert text.endswith(f"; worst at {worst.index}: {worst.actual:.9g} for {worst.exact:.9g}")
    assert np.isfinite(worst.share)
    right["grad_input"][0, 0, 0] = np.nan
    (output, *_) = judge("layer_norm_backward", case.arguments, right).outputs
    assert "; first at (0, 0, 0): nan for " in output.report.text


def test_what_is_wrong_beside_special_values_is_described_too() -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        results["grad_input"][4] = 0
        results["grad_input"][4, 0, :2] = np.nan

    assert found_in("layer_norm_backward", change) == {
        "row": "in 3 of 33 rows: 12–14",
        "special": "2 NaN where numbers are right",
        "zero": "the other 1543 are 0",
    }


def test_a_number_within_the_bound_of_an_overflow_is_not_out_of_place() -> None:
    exact = np.array([65520.0])  # halfway between float16's largest number and what rounds to Inf
    measured = Measured(np.array([65504], np.float16), exact, Magnitude(exact))
    assert measured.share_of_bound <= 1
    assert measured.misplaced == ""


def test_one_value_in_place_of_all() -> None:
    found = found_in("batch_norm_elemt", put("output", np.s_[2], 9))
    assert found == {"sample": "in sample 2 of 6", "constant": "all of them are 9"}
    # So large that any offset would be within its rounding.
    assert found_in("layer_norm", put("output", np.s_[2:4], 65504), "float16")["constant"] == "all of them are 65504"


def test_results_that_were_clipped() -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        results["grad_input"] = np.clip(results["grad_input"], -1, 1)

    assert found_in("batch_norm_elemt_backward", change)["constant"] == "all of them are 1 or −1"


def test_constants_are_written_out() -> None:
    found = found_in("layer_norm_backward", scaled("grad_input", np.s_[:], 515))
    assert found["factor"] == "all of them are 515 times the exact value"
    found = found_in("layer_norm_backward", scaled("grad_bias", np.s_[:], 500))
    assert found["factor"] == "all of them are 500 times the exact value"


def test_results_of_another_row() -> None:
    def broadcast(results: dict[str, np.ndarray]) -> None:
        results["grad_input"][:] = results["grad_input"][0]

    assert found_in("group_norm_backward", broadcast) == {
        "sample": "in 2 of 3 samples: 1–2",
        "copy": "all of these samples have the results of sample 0",
    }

    def once(results: dict[str, np.ndarray]) -> None:
        results["output"][:, 7] = results["output"][:, 3]

    found = found_in("batch_norm_elemt", once)
    assert found == {"channel": "in channel 7 of 19", "copy": "channel 7 has the results of channel 3"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_constant_of_each_row_or_channel(dtype: str) -> None:
    case = one_case("batch_norm_elemt", dtype=dtype)
    weight, bias = (case.arguments[name].astype(np.float64).reshape(19, 1, 1) for name in ("weight", "bias"))

    def other_bias(results: dict[str, np.ndarray]) -> None:
        results["output"] = (results["output"] - bias + np.roll(bias, 1)).astype(results["output"].dtype)

    def twice_the_weight(results: dict[str, np.ndarray]) -> None:
        results["output"] = (results["output"] * weight).astype(results["output"].dtype)

    found = found_in("batch_norm_elemt", other_bias, dtype)
    assert found["offset"] == "in each channel they are too large or too small by one constant"
    text = "in each channel they are one constant times the exact value"
    assert found_in("batch_norm_elemt", twice_the_weight, dtype)["factor"] == text


def test_the_error_of_a_constant_grows_with_it() -> None:
    case = one_case("batch_norm_elemt_backward")
    case.arguments["weight"][3] = 0.001
    computed = normgrad.batch_norm_elemt_backward(**case.arguments)
    without_weight = computed / case.arguments["weight"].reshape(-1, *[1] * (computed.ndim - 2))
    (output,) = judge("batch_norm_elemt_backward", case.arguments, {"grad_input": without_weight}).outputs
    kinds = {cluster.kind: cluster.text for cluster in output.errors.clusters}
    assert kinds["factor"] == "in each channel they are one constant times the exact value"


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_a_result_that_went_through_16_bits(narrow: str) -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        results["grad_input"] = results["grad_input"].astype(np.dtype(narrow)).astype(np.float32)

    assert found_in("layer_norm_backward", change)["rounded"] == f"all of them are the exact value rounded to {narrow}"


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
@pytest.mark.parametrize("output", ["grad_input", "grad_weight"])
def test_a_result_that_was_computed_in_16_bits(narrow: str, output: str) -> None:
    """As of sums that were accumulated in the dtype of the data."""
    dtype = np.dtype(narrow)

    def change(results: dict[str, np.ndarray]) -> None:
        random = np.random.default_rng(0)
        errors = 1 + 0.05 * random.normal(size=results[output].shape)
        results[output] = (results[output] * errors).astype(dtype).astype(np.float32)

    found = found_in("layer_norm_backward", change)
    assert found["rounded"] == f"all of them are values of {narrow}, but not the nearest ones"


def test_small_integers_were_not_computed_in_16_bits() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    sums = {"sum_dy": np.float32([9, 9, 9]), "sum_dy_xmu": np.float32([1, 2, 4]), "grad_weight": np.float32([3, 5, 8])}
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    call = {"grad_out": x, "input": x, "mean": zero, "invstd": one, "weight": None, "bias_g": False}
    for name in sums:
        assert "rounded" not in found_of(judge("batch_norm_reduce_backward", call, sums), name)


def test_zeros_where_the_variance_is_0_are_zeros() -> None:
    case = one_case("layer_norm", "constant")
    results = right_results(case)
    results["rstd"][:] = 0
    found = found_of(judge("layer_norm", case.arguments, results), "rstd")
    assert found["zero"] == "all of them are 0"
    assert "statistic" not in found


def test_terms_that_were_not_divided() -> None:
    """Computed with a counter of 1: the error grows with the term."""
    case = one_case("batch_norm_elemt_backward")
    computed = normgrad.batch_norm_elemt_backward(**{**case.arguments, "counter": np.array([1], np.int32)})
    (output,) = judge(case.operator, case.arguments, {"grad_input": computed}).outputs
    (text,) = (cluster.text for cluster in output.errors.clusters if cluster.kind == "term")
    n = int(np.sum(case.arguments["counter"]))
    assert text.startswith("all of them have the terms −sum_dy/n·invstd·weight and −(x − mean)")
    assert text.endswith(f" {n} times")


@pytest.mark.parametrize(("operator", "output"), [("layer_norm", "rstd"), ("batch_norm_stats", "invstd")])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 1e-6])
def test_a_wrong_eps(operator: str, output: str, eps: float) -> None:
    case = one_case(operator)
    wrong = right_results(replace(case, arguments={**case.arguments, "eps": eps}))
    found = found_in(operator, put(output, np.s_[:], wrong[output]))
    (text,) = re.findall("all of them are correct for an eps of (.*)", found["term"])
    assert text == "0.001" if eps == 1e-3 else eps <= float(text.removesuffix(" or less")) < 5e-6


def test_a_result_that_was_cut_off_to_16_bits() -> None:
    """As a kernel narrows that keeps the upper half of a float32."""

    def change(results: dict[str, np.ndarray]) -> None:
        results["output"] = (results["output"].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    assert found_in("group_norm", change)["rounded"] == "all of them are the exact value truncated to bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("operator", "output", "times", "text"),
    [
        ("layer_norm_backward", "grad_input", {1: 0}, "all of them lack the term −rstd·Σg/N"),
        ("layer_norm_backward", "grad_input", {2: 0}, "all of them lack the term −rstd·x̂·Σ(g·x̂)/N"),
        (
            "group_norm_backward",
            "grad_input",
            {2: -1},
            "all of them have the term −rstd·x̂·Σ(g·x̂)/N with the wrong sign",
        ),
        ("batch_norm_elemt_backward", "grad_input", {1: 0}, "all of them lack the term −sum_dy/n·invstd·weight"),
        ("group_norm", "output", {1: 0}, "all of them lack the term bias"),
        ("batch_norm_elemt", "output", {1: 2}, "all of them have the term bias 2 times"),
        (
            "layer_norm_backward",
            "grad_input",
            {1: 515, 2: 515},
            "all of them have the terms −rstd·Σg/N and −rstd·x̂·Σ(g·x̂)/N 515 times",
        ),
    ],
)
def test_a_term_of_the_formula_that_is_wrong(
    operator: str, output: str, times: dict[int, int], text: str, dtype: str
) -> None:
    case = one_case(operator, dtype=dtype)
    parts = anatomy(operator, {**case.arguments, **checked(OPERATORS[operator], case.arguments, None).attributes})[
        output
    ]
    values = [np.broadcast_to(term, parts.shape) for term in parts.terms.values()]

    def change(results: dict[str, np.ndarray]) -> None:
        wrong = sum(times.get(n, 1) * value for n, value in enumerate(values))
        results[output] = wrong.reshape(results[output].shape).astype(dtype)

    assert found_in(operator, change, dtype)["term"] == text


def test_terms_with_a_factor() -> None:
    """As a count of one rank gives them in place of the sum of all, or C·HxW elements in place of a group's."""
    case = one_case("batch_norm_elemt_backward")
    counter = case.arguments["counter"]
    computed = normgrad.batch_norm_elemt_backward(**{**case.arguments, "counter": counter[:1]})
    (output,) = judge(case.operator, case.arguments, {"grad_input": computed}).outputs
    (text,) = (cluster.text for cluster in output.errors.clusters if cluster.kind == "term")
    found = re.fullmatch("all of them have the terms −sum_dy/n.* and −.* multiplied by (.*)", text)
    assert found is not None
    assert abs(float(found[1]) - np.sum(counter) / counter.flat[0]) < 1e-3


@pytest.mark.parametrize(
    ("operator", "left_out"),
    [("batch_norm_elemt", "weight"), ("group_norm", "weight"), ("layer_norm_backward", "weight")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_argument_that_was_left_out(operator: str, left_out: str, dtype: str) -> None:
    case = one_case(operator, dtype=dtype)
    assert case.arguments[left_out] is not None
    results = right_results(case)
    output = next(iter(results))
    results[output] = right_results(replace(case, arguments={**case.arguments, left_out: None}))[output]
    found = {c.kind: c.text for c in judge(operator, case.arguments, results).outputs[0].errors.clusters}
    assert found["term"] == f"all of them are correct for a call without {left_out}"


@pytest.mark.parametrize(
    ("operator", "output", "statistic", "value", "text"),
    [
        ("layer_norm_backward", "grad_weight", "mean", 0, "a mean of 0"),
        ("group_norm_backward", "grad_weight", "rstd", 1, "an rstd of 1"),
        ("batch_norm_reduce_backward", "sum_dy_xmu", "mean", 0, "a mean of 0"),
        ("batch_norm_elemt_backward", "grad_input", "invstd", 1, "an invstd of 1"),
    ],
)
def test_a_statistic_that_was_left_out(operator: str, output: str, statistic: str, value: int, text: str) -> None:
    case = one_case(operator)
    arguments = {**case.arguments, statistic: np.full_like(case.arguments[statistic], value)}
    results = {**right_results(case), output: right_results(replace(case, arguments=arguments))[output]}
    found = found_of(judge(operator, case.arguments, results), output)
    assert found["term"] == f"all of them are correct for a call with {text}"


@pytest.mark.parametrize(
    ("operator", "one", "other"),
    [
        ("layer_norm_backward", "grad_out", "input"),
        ("layer_norm_backward", "mean", "rstd"),
        ("group_norm_backward", "mean", "rstd"),
        ("layer_norm", "weight", "bias"),
        ("batch_norm_elemt", "mean", "invstd"),
        ("batch_norm_elemt_backward", "sum_dy", "sum_dy_xmu"),
        ("batch_norm_reduce_backward", "grad_out", "input"),
        ("batch_norm_gather_stats_with_counts", "mean", "invstd"),
    ],
)
def test_arguments_that_were_exchanged(operator: str, one: str, other: str) -> None:
    case = one_case(operator)
    arguments = {**case.arguments, one: case.arguments[other], other: case.arguments[one]}
    results = right_results(replace(case, arguments=arguments))
    judgement = judge(operator, case.arguments, results)
    found = [found_of(judgement, output.name) for output in judgement.outputs if not output.passed]
    assert found
    for patterns_of in found:
        assert patterns_of["term"] == f"all of them are correct for a call with {one} and {other} exchanged"


def images(operator: str) -> TestCase:
    case = one_case(operator)
    assert case.arguments["input"].ndim == 4
    return case


@pytest.mark.parametrize("is_read_as_channels_last", [True, False])
@pytest.mark.parametrize(
    ("operator", "read", "is_written"),
    [
        ("group_norm_backward", ("grad_out", "input"), False),
        ("group_norm_backward", ("input",), False),
        ("group_norm_backward", ("grad_out", "input"), True),
        ("batch_norm_elemt_backward", ("grad_out",), False),
        ("group_norm", ("input",), True),
        ("batch_norm_stats", ("input",), False),
    ],
)
def test_data_that_was_read_in_the_other_memory_format(
    operator: str, read: tuple[str, ...], is_written: bool, is_read_as_channels_last: bool
) -> None:
    """As of a kernel that ignores the strides of its tensors."""
    case = images(operator)
    samples, channels = case.arguments["input"].shape[:2]

    def to_last(array: np.ndarray) -> np.ndarray:
        return array.reshape(samples, channels, -1).swapaxes(1, 2).reshape(array.shape)

    def to_first(array: np.ndarray) -> np.ndarray:
        return array.reshape(samples, -1, channels).swapaxes(1, 2).reshape(array.shape)

    inwards, outwards = (to_first, to_last) if is_read_as_channels_last else (to_last, to_first)
    changed = {name: inwards(case.arguments[name]) for name in read}
    results = right_results(replace(case, arguments={**case.arguments, **changed}))
    data = "grad_input" if "grad_out" in case.arguments else "output"
    if is_written:
        results[data] = outwards(results[data])
    judgement = judge(operator, case.arguments, results)
    names = [*read, *([data] if is_written else [])]
    memory, other = ("contiguous", "channels_last") if is_read_as_channels_last else ("channels_last", "contiguous")
    verb = "read and written" if is_written else "read"
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    text = f"all of them are correct for a call with the {memory} memory of {listed} {verb} as {other}"
    (first, *_) = (output for output in judgement.outputs if not output.passed)
    assert text in [cluster.text for cluster in first.errors.clusters]


@pytest.mark.parametrize(
    ("operator", "by", "text"),
    [
        ("layer_norm_backward", 1, "row before"),
        ("layer_norm_backward", -1, "row after"),
        ("group_norm_backward", -1, "group after"),
        ("batch_norm_elemt_backward", 1, "channel before"),
        ("batch_norm_reduce_backward", -1, "channel after"),
    ],
)
def test_the_statistics_of_a_neighbour(operator: str, by: int, text: str) -> None:
    case = one_case(operator)
    names = [name for name in ("mean", "rstd", "invstd") if name in case.arguments]
    moved = {name: np.roll(array, by).reshape(array.shape) for name, array in case.arguments.items() if name in names}
    assert len(moved) == 2
    results = right_results(replace(case, arguments={**case.arguments, **moved}))
    judgement = judge(operator, case.arguments, results)
    output = "grad_weight" if "grad_weight" in results else "grad_input"
    found = found_of(judgement, output)
    assert found["term"] == f"all of them are correct for a call with the {names[0]} and {names[1]} of the {text}"


@pytest.mark.parametrize("operator", ["group_norm_backward", "group_norm"])
def test_parameters_of_another_channel(operator: str) -> None:
    case = one_case(operator)
    group, channels = case.arguments["group"], case.arguments["C"]
    names = [name for name in ("weight", "bias") if name in case.arguments]
    listed = " and ".join(names)
    for order, text in (
        (np.roll(np.arange(channels), 1), "of the channel before"),
        (np.roll(np.arange(channels), -1), "of the channel after"),
        (np.arange(channels).reshape(group, -1).T.ravel(), f"transposed as a matrix of {group}×{channels // group}"),
        (np.arange(channels).reshape(-1, group).T.ravel(), f"transposed as a matrix of {channels // group}×{group}"),
    ):
        moved = {name: case.arguments[name][order] for name in names}
        results = right_results(replace(case, arguments={**case.arguments, **moved}))
        data = next(iter(results))
        found = found_of(judge(operator, case.arguments, results), data)
        assert found["term"] == f"all of them are correct for a call with the {listed} {text}"


def test_a_weight_of_two_dimensions_that_was_transposed() -> None:
    random = np.random.default_rng(0)
    x, weight, bias = (random.normal(size=shape).astype(np.float32) for shape in ((7, 4, 6), (4, 6), (4, 6)))
    arguments = {"input": x, "normalized_shape": [4, 6], "weight": weight, "bias": bias}
    case = TestCase("layer_norm", "", "", {**arguments, "weight": weight.T.copy().reshape(4, 6)})
    found = found_of(judge("layer_norm", arguments, right_results(case)), "output")
    assert found["term"] == "all of them are correct for a call with the weight transposed as a matrix of 4×6"


def test_the_other_momentum() -> None:
    """Frameworks differ in whether the momentum is the share of the old statistics or of the new ones."""
    case = one_case("batch_norm_gather_stats_with_counts")
    momentum = float(case.arguments["momentum"])
    results = right_results(case)
    other = right_results(replace(case, arguments={**case.arguments, "momentum": 1 - momentum}))
    results["running_mean"] = other["running_mean"]
    found = found_of(judge(case.operator, case.arguments, results), "running_mean")
    assert found["term"] == f"all of them are correct for a call with a momentum of {1 - momentum:g}"


@pytest.mark.parametrize(
    ("operator", "output"),
    [("layer_norm", "rstd"), ("group_norm", "rstd"), ("batch_norm_stats", "invstd")],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("power", "lost", "with_eps", "text"),
    [
        (1.0, 0, False, "the variance"),
        (1.0, 0, True, "variance + eps"),
        (0.5, 0, False, "√variance"),
        (0.5, 0, True, "√(variance + eps)"),
        (-1.0, 0, None, "1/(√variance + eps)"),
        (0.5, 1, False, "√variance, with a variance that is divided by N − 1"),
        (-0.5, 1, True, "1/√(variance + eps), with a variance that is divided by N − 1"),
    ],
)
def test_another_statistic(
    operator: str, output: str, dtype: str, power: float, lost: int, with_eps: bool | None, text: str
) -> None:
    case = one_case(operator, dtype=dtype)
    case.arguments["eps"] = eps = 0.01
    results = right_results(case)
    exact = exact_results(OPERATORS[operator], checked(OPERATORS[operator], case.arguments, None))[output]
    count = case.arguments["input"].size // exact.size
    variance = (1 / exact**2 - eps) * count / (count - lost)
    changed = 1 / (np.sqrt(variance) + eps) if with_eps is None else (variance + eps * with_eps) ** power
    results[output] = changed.astype(np.float32)
    found = found_of(judge(operator, case.arguments, results), output)
    assert found["statistic"] == f"all of them are {text}"


SUMS = [
    ("layer_norm_backward", "grad_weight", "row", 33),
    ("layer_norm_backward", "grad_bias", "row", 33),
    ("group_norm_backward", "grad_weight", "sample", 3),
    ("batch_norm_reduce_backward", "sum_dy_xmu", "sample", 6),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize(("operator", "output", "noun", "count"), SUMS)
def test_terms_of_a_sum_that_are_lost_or_there_twice(
    operator: str, output: str, noun: str, count: int, times: int, dtype: str
) -> None:
    """As of a CTA whose partial sums were not added, or added twice."""
    case = one_case(operator, dtype=dtype)
    assert math.prod(case.arguments["input"].shape[: 2 if noun == "row" else 1]) == count
    first, last = count // 4, count // 2
    grad_out = case.arguments["grad_out"].astype(np.float64)
    changed = grad_out.reshape(count, -1).copy()
    changed[first : last + 1] *= times
    arguments = {**case.arguments, "grad_out": changed.reshape(grad_out.shape).astype(case.arguments["grad_out"].dtype)}
    results = {**right_results(case), output: right_results(replace(case, arguments=arguments))[output]}
    found = found_of(judge(operator, case.arguments, results), output)
    which = f"{noun}s {first}–{last} of {count}"
    assert found["sum"] == f"all of them {f'lack {which}' if times == 0 else f'have {which} twice'}"


@pytest.mark.parametrize(("operator", "output", "text"), [
    ("layer_norm", "mean", "column 5 of every 8"),
    ("layer_norm_backward", "grad_bias", "row 1 of every 2"),
    ("batch_norm_reduce_backward", "sum_dy", "term 3 of every 4, counted in the order sample, position"),
])  # fmt: skip
def test_a_lane_of_a_sum_that_is_lost(operator: str, output: str, text: str) -> None:
    case = one_case(operator)
    parts = anatomy(operator, {**case.arguments, **checked(OPERATORS[operator], case.arguments, None).attributes})
    summands = parts[output].summands
    assert summands is not None
    lane, period = map(int, re.findall(r"\d+", text))
    kept = np.arange(summands.terms.shape[1]) % period != lane
    results = right_results(case)
    results[output] = np.sum(summands.terms[:, kept], axis=1).reshape(results[output].shape).astype(np.float32)
    found = found_of(judge(operator, case.arguments, results), output)
    assert found["sum"] == f"all of them lack {text}"


def test_positions_of_a_sum_that_are_lost() -> None:
    case = one_case("group_norm_backward")
    results = right_results(case)
    places, shape = case.arguments["HxW"], case.arguments["input"].shape
    last = np.sum(case.arguments["grad_out"].reshape(shape[0], shape[1], -1)[-1, :, -3:], axis=-1, dtype=np.float64)
    results["grad_bias"] = (
        exact_results(OPERATORS[case.operator], checked(OPERATORS[case.operator], case.arguments, None))["grad_bias"]
        - last
    ).astype(np.float32)
    count = shape[0] * places
    found = found_of(judge(case.operator, case.arguments, results), "grad_bias")
    assert found["sum"] == (
        f"all of them lack terms {count - 3}–{count - 1} of {count}, counted in the order sample, position"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("operator", "output", "text"),
    [
        ("group_norm_backward", "grad_bias", "lack positions 184–186 of 187 in every sample"),
        ("group_norm_backward", "grad_weight", "lack position 186 of 187 in every sample"),
        ("batch_norm_reduce_backward", "sum_dy_xmu", "have positions 64–76 of 77 in every sample twice"),
        ("batch_norm_reduce_backward", "sum_dy", "lack position 3 of every 4 in every sample"),
        ("group_norm", "mean", "lack positions 176–186 of 187 in every channel"),
    ],
)
def test_the_same_positions_of_every_sample(operator: str, output: str, text: str, dtype: str) -> None:
    """As of a missing mask at the end of a plane of HxW positions."""
    case = one_case(operator, dtype=dtype)
    parts = anatomy(operator, {**case.arguments, **checked(OPERATORS[operator], case.arguments, None).attributes})
    summands = parts[output].summands
    assert summands is not None
    positions = math.prod(case.arguments["input"].shape[2:])
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    place = np.arange(summands.count) % positions
    is_chosen = place % numbers[1] == numbers[0] if "every 4" in text else (place >= numbers[0])
    results = right_results(case)
    changed = np.sum(summands.terms * np.where(is_chosen, 2 if "twice" in text else 0, 1), axis=1)
    results[output] = rounded(changed.reshape(results[output].shape), results[output].dtype)
    found = found_of(judge(operator, case.arguments, results), output)
    assert found["sum"] == f"all of them {text}"


@pytest.mark.parametrize(
    ("operator", "names", "which", "text"),
    [
        ("layer_norm_backward", "gx", (512, 515), "the sums Σg and Σ(g·x̂) of the rows lack columns 512–514 of 515"),
        ("layer_norm_backward", "x", (0, 64), "the sums Σ(g·x̂) of the rows lack columns 0–63 of 515"),
        ("layer_norm_backward", "g", (99, 100), "the sums Σg of the rows lack column 99 of 515"),
        (
            "group_norm_backward",
            "gx",
            (184, 187),
            "the sums Σg and Σ(g·x̂) of the rows lack positions 184–186 of 187 in every channel"
            " (a row is a group of a sample)",
        ),
    ],
)
def test_sums_of_rows_that_lack_terms(operator: str, names: str, which: tuple[int, int], text: str) -> None:
    """As of a reduction without the remainder of a row: every element of grad_input is wrong."""
    case = one_case(operator)
    results = right_results(case)
    results["grad_input"] = with_sums_over(case, names, lambda terms: np.delete(terms, np.s_[slice(*which)], axis=-1))
    found = found_of(judge(operator, case.arguments, results), "grad_input")
    assert found["sum"] == text


def with_sums_over(case: TestCase, names: str, kept: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """grad_input with the sums Σg (``g``) and Σ(g·x̂) (``x``) over some terms of a row, or of other terms."""
    shape = case.arguments["input"].shape
    data = (shape[0], 4, 6, -1) if case.operator == "group_norm_backward" else (33, 1, 1, -1)
    dy, x, mean, rstd, weight = (
        case.arguments[name].astype(np.float64) for name in ("grad_out", "input", "mean", "rstd", "weight")
    )
    dy, x, mean, rstd = dy.reshape(data), x.reshape(data), mean.reshape(*data[:2], 1, 1), rstd.reshape(*data[:2], 1, 1)
    g, x_hat = dy * weight.reshape(1, 4, 6, 1) if data[1] > 1 else dy * weight, (x - mean) * rstd
    sums = [
        np.sum(kept(terms) if name in names else terms, axis=(2, 3), keepdims=True)
        for name, terms in (("g", g), ("x", g * x_hat))
    ]
    wrong = rstd * (g - (sums[0] + x_hat * sums[1]) / (g.shape[2] * g.shape[3]))
    return rounded(wrong.reshape(shape), case.arguments["input"].dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("operator", ["layer_norm_backward", "group_norm_backward"])
def test_sums_of_rows_that_are_wrong(operator: str, dtype: str) -> None:
    """As of partial sums that a race lost, in each row others."""
    case = one_case(operator, dtype=dtype)
    results = right_results(case)
    random = np.random.default_rng(0)
    results["grad_input"] = with_sums_over(case, "gx", lambda terms: terms * (random.random(terms.shape) < 0.8))
    found = found_of(judge(operator, case.arguments, results), "grad_input")
    assert found["term"].removesuffix(" (a row is a group of a sample)") == (
        "in each row they are correct for other values of Σg and Σ(g·x̂)"
    )


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("mean",), "another value of mean"),
        (("rstd",), "another value of rstd"),
        (("mean", "rstd"), "other values of mean and rstd"),
    ],
)
@pytest.mark.parametrize(("operator", "dtype"), [("layer_norm", "float32"), ("group_norm", "bfloat16")])
def test_an_output_of_other_statistics(operator: str, dtype: str, names: tuple[str, ...], text: str) -> None:
    """As of statistics that are saved well and used badly."""
    case = one_case(operator, dtype=dtype)
    x, weight, bias = (case.arguments[name].astype(np.float64) for name in ("input", "weight", "bias"))
    results, random = right_results(case), np.random.default_rng(0)
    used = {
        name: results[name].astype(np.float64) + (0.1 * random.normal(size=results[name].shape) if name in names else 0)
        for name in ("mean", "rstd")
    }
    if operator == "group_norm":
        x = x.reshape(3, 4, -1)
        used = {name: array.reshape(3, 4, 1) for name, array in used.items()}
    x_hat = ((x - used["mean"]) * used["rstd"]).reshape(case.arguments["input"].shape)
    parameters = (1, 24, 1, 1) if operator == "group_norm" else (-1,)
    results["output"] = rounded(x_hat * weight.reshape(parameters) + bias.reshape(parameters), results["output"].dtype)
    found = found_of(judge(operator, case.arguments, results), "output")
    assert found["term"].removesuffix(" (a row is a group of a sample)") == f"in each row they are correct for {text}"


def test_results_that_are_wrong_at_random_have_no_other_values_of_rows() -> None:
    for seed in range(20):
        for operator in ("layer_norm_backward", "group_norm_backward", "layer_norm", "group_norm"):
            case, name = one_case(operator), "grad_input" if operator.endswith("backward") else "output"
            results = right_results(case)
            change = np.random.default_rng(seed).normal(size=results[name].shape, scale=10.0 ** -(seed % 7))
            results[name] += change.astype(np.float32)
            found = found_of(judge(operator, case.arguments, results), name)
            assert not {"sum", "term"} & set(found)


def test_sums_that_are_wrong_at_random_lack_no_terms() -> None:
    for seed in range(20):
        for operator, output, *_ in SUMS:
            case = one_case(operator)
            results = right_results(case)
            random = np.random.default_rng(seed)
            results[output] += random.normal(size=results[output].shape).astype(np.float32)
            assert "sum" not in found_of(judge(operator, case.arguments, results), output)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_result_that_was_truncated_to_its_own_dtype(dtype: str) -> None:
    case = one_case("layer_norm_backward", dtype=dtype)
    exact = oracle.layer_norm_backward(**case.arguments)[0].astype(np.float32)
    lost = {"float16": 13, "bfloat16": 16}[dtype]
    truncated = (exact.view(np.uint32) >> lost << lost).view(np.float32).astype(np.dtype(dtype))
    results = {**right_results(case), "grad_input": truncated}
    found = found_of(judge(case.operator, case.arguments, results), "grad_input")
    assert found["rounded"] == f"all of them are the exact value truncated to {dtype}, and it must be rounded"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("factor", [1.5, 0.5, 3])
def test_a_constant_factor(dtype: str, factor: float) -> None:
    found = found_in("layer_norm_backward", scaled("grad_input", np.s_[:], factor), dtype)
    assert found["factor"] == f"all of them are {factor:g} times the exact value"


@pytest.mark.parametrize("offset", [0.001, -0.25])
def test_a_constant_offset(offset: float) -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        results["grad_input"] += np.float32(offset)

    word = "large" if offset > 0 else "small"
    assert found_in("group_norm_backward", change)["offset"] == f"all of them are {abs(offset)} too {word}"


def test_an_input_in_place_of_the_result() -> None:
    """As a kernel leaves it that works in place and was not run."""
    case = one_case("group_norm_backward", dtype="bfloat16")
    found = found_in("group_norm_backward", put("grad_input", np.s_[:], case.arguments["grad_out"]), "bfloat16")
    assert found["copy"] == "all of them equal the grad_out that the call was given"
    case = one_case("batch_norm_gather_stats_with_counts")
    old = case.arguments["running_var"]
    found = found_in("batch_norm_gather_stats_with_counts", put("running_var", np.s_[:], old))
    assert found["copy"] == "all of them equal the running_var that the call was given"


@pytest.mark.parametrize(
    ("operator", "one", "other"),
    [
        ("layer_norm_backward", "grad_weight", "grad_bias"),
        ("group_norm", "mean", "rstd"),
        ("batch_norm_reduce_backward", "sum_dy_xmu", "grad_weight"),
    ],
)
def test_outputs_that_are_exchanged(operator: str, one: str, other: str) -> None:
    """As a program has them that passes its outputs in the wrong order."""
    case = one_case(operator)
    right = right_results(case)
    results = {**right, one: right[other], other: right[one]}
    found = {output.name: output for output in judge(operator, case.arguments, results).outputs}
    for name, source in ((one, other), (other, one)):
        assert found[name].errors.clusters[-1] == Cluster("copy", f"the result is that of {source}, another output")
    assert all(output.passed for name, output in found.items() if name not in (one, other))


def test_signs_and_zeros() -> None:
    assert "sign" in found_in("layer_norm_backward", scaled("grad_input", np.s_[2:4], -1))
    found = found_in("layer_norm_backward", put("grad_weight", np.s_[-3:], 0))
    assert found == {
        "tail": "in the last 3 of the 515 elements of the result, the remainder after blocks of 4 to 512",
        "zero": "all of them are 0",
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_errors_that_only_look_alike_are_no_constant(dtype: str) -> None:
    """Errors of random size, and some just beyond the bound."""

    def change(results: dict[str, np.ndarray]) -> None:
        random = np.random.default_rng(0)
        flat = results["grad_input"].reshape(-1)
        flat[:600] = (flat[:600].astype(np.float64) * (1 + random.uniform(0.01, 0.03, 600))).astype(flat.dtype)

    found = found_in("layer_norm_backward", change, dtype)
    assert {"factor", "offset", "constant", "rounded", "swap", "shift", "copy"}.isdisjoint(found)


def test_wrong_values_beyond_any_ratio() -> None:
    """The wrong values over the exact ones are beyond float64."""
    case = one_case("batch_norm_elemt", "tiny")
    case.arguments["invstd"][:] = 1e-38
    case.arguments["mean"][:] = case.arguments["bias"][:] = 0
    results = right_results(case)
    results["output"][:] = np.random.default_rng(0).uniform(1e38, 2e38, results["output"].shape)
    (output,) = judge("batch_norm_elemt", case.arguments, results).outputs
    assert {cluster.kind for cluster in output.errors.clusters} <= {"everywhere", "offset"}


def test_swapped_elements_channels_and_rows() -> None:
    elements = found_in("layer_norm_backward", swapped("grad_weight", 0, 0, 1))
    assert elements["swap"] == "elements 0 and 1 are swapped"
    channels = found_in("batch_norm_elemt", swapped("output", 1, 1, 2))
    assert channels == {"channel": "in 2 of 19 channels: 1–2", "swap": "channels 1 and 2 are swapped"}
    samples = found_in("group_norm_backward", swapped("grad_input", 0, 0, 2))
    assert samples == {"sample": "in 2 of 3 samples: 0, 2", "swap": "samples 0 and 2 are swapped"}


def test_elements_that_moved_on() -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        results["grad_weight"] = np.roll(results["grad_weight"], 1)

    text = "all 515 elements have the results of the element before them, the first has that of the last"
    assert found_in("layer_norm_backward", change)["shift"] == text

    def change_but_one(results: dict[str, np.ndarray]) -> None:
        change(results)
        results["grad_weight"][0] = 0

    found = found_in("layer_norm_backward", change_but_one)
    assert "swap" not in found
    assert found["shift"] == "514 of these 515 elements have the results of the element before them"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "ends"), [(1, "all"), (-1, "all"), (4, "all"), (4, "stale"), (1, "stale")])
def test_a_result_that_starts_at_a_wrong_address(k: int, ends: str, dtype: str) -> None:
    """All elements are those k before or after them, through the ends of rows."""

    def change(results: dict[str, np.ndarray]) -> None:
        flat = results["grad_input"].reshape(-1)
        moved = np.roll(flat, k)
        if ends == "stale":
            moved[:k] = flat[:k]
        results["grad_input"] = moved.reshape(results["grad_input"].shape)

    found = found_in("group_norm_backward", change, dtype)
    by = f"{abs(k)} element{'s' if abs(k) > 1 else ''}"
    source = f"i {'−' if k > 0 else '+'} {abs(k)}"
    assert found["shift"] == f"the flattened result is shifted by {by}: element i has the value of element {source}"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        (np.arange(33)[::-1], "swap", "these 32 rows are in reverse order"),
        (np.r_[:5, 28:4:-1, 29:33], "swap", "these 24 rows are in reverse order"),
        (np.r_[12:24, :12, 24:33], "swap", "the two halves of these 24 rows are swapped"),
        (np.r_[np.arange(24) ^ 1, 24:33], "swap", "these 24 rows are swapped in pairs: 0 and 1, 2 and 3, …"),
        (np.r_[30:33, :30], "shift", r"all 33 rows have .* 3 before them, the first 3 those of the last 3"),
        (np.r_[1:33, 0], "shift", r"all 33 rows have .* row after them, the last has that of the first"),
        (np.r_[:3, :30], "shift", r"all of these rows have the results of the row 3 before them"),
        (np.r_[:5, 7, 5, 6, 8:33], "swap", "these 3 rows have each other's results: 5 has 7, 6 has 5, 7 has 6"),
        (
            np.r_[np.arange(32) * 5 % 32, 32],
            "swap",
            "these 28 rows have each other's results: 1 has 5, 2 has 10, .*, …",
        ),
        (np.r_[:25, 5:13], "shift", "all of these rows have the results of the row 20 before them"),
        (np.arange(33) // 2, "copy", "these 32 rows have the results of other rows: 1 has 0, 2 has 1, 3 has 1, .*, …"),
    ],
)
def test_rows_in_another_order(rows: np.ndarray, kind: str, text: str, dtype: str) -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        results["grad_input"] = results["grad_input"].reshape(33, 515)[rows].reshape(11, 3, 515)

    assert re.fullmatch(text, found_in("layer_norm_backward", change, dtype)[kind])


@pytest.mark.parametrize(
    ("shape", "axes", "taken"),
    [
        ((3, 24, 187), (0, 2, 1), "its 3 matrices of 24×187 (C×HxW)"),
        ((3, 187, 24), (0, 2, 1), "its 3 matrices of 187×24 (HxW×C)"),
        ((72, 17, 11), (0, 2, 1), "its 72 matrices of 17×11"),
        ((3, 24 * 187), (1, 0), "its matrix of 3×4488"),
    ],
)
def test_transposed_results(shape: tuple[int, ...], axes: tuple[int, ...], taken: str) -> None:
    def change(results: dict[str, np.ndarray]) -> None:
        right = results["grad_input"]
        results["grad_input"] = right.reshape(shape).transpose(axes).reshape(right.shape)

    text = f"all of them are those of the exact result with {taken} transposed"
    assert found_in("group_norm_backward", change)["transposed"] == text


def test_errors_that_are_just_beyond_the_bound_come_from_no_other_row() -> None:
    """Though they are within the larger bound of another one."""
    case = one_case("group_norm_backward", "one-column")
    results = right_results(case)  # all 0
    (bound, *_) = (output.measured.limit for output in judge(case.operator, case.arguments, results).outputs)
    results["grad_input"].flat[:8] = np.float32(1.5) * bound.flat[:8]
    found = found_in("group_norm_backward", lambda right: right.update(results), kind="one-column")
    assert {"swap", "shift", "copy", "transposed"}.isdisjoint(found)


def test_layouts() -> None:
    layer, group = (one_case(f"{name}_norm_backward").arguments for name in ("layer", "group"))
    assert layout_of(layer, 33 * 515) == Layout(515, 515)
    assert layout_of(layer, 515) == Layout(515)
    assert layout_of(group, 3 * 24 * 187) == Layout(6 * 187, 24, 187, "group")
    batch = one_case("batch_norm_elemt").arguments
    assert layout_of(batch, 6 * 19 * 77) == Layout(77, 19, 77, "channel")
    # In two dimensions a row is a sample.
    layout = layout_of({"input": np.zeros((40, 64))}, 40 * 64)
    assert layout == Layout(64, 64, 1, "sample")
    is_wrong = np.zeros((40, 64), bool)
    is_wrong[:, 1::2] = True
    (found,) = clusters(is_wrong, layout)
    assert found.text == "at position 1 of every block of 2 elements of samples"


def test_results_that_are_no_results() -> None:
    case = one_case("layer_norm_backward", dtype="float16")
    results = right_results(case)
    results["grad_weight"] = results["grad_weight"].astype(np.float32)
    results["grad_input"] = results["grad_input"].reshape(-1)
    del results["grad_bias"]
    judgement = judge("layer_norm_backward", case.arguments, results)
    assert [(output.passed, output.report.text) for output in judgement.outputs] == [
        (False, "has the shape (16995,), and must have (11, 3, 515)"),
        (False, "is float32, and must be float16"),
        (False, "is missing"),
    ]
    assert json.loads(json.dumps(judgement.as_json(), allow_nan=False))["passed"] is False
    assert "is missing" in page("title", "", [section("case", judgement, with_plots=True)], ORIGIN)


STATISTICS = {"mean": np.zeros(3, np.float32), "invstd": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("operator", "more", "text"),
    [
        ("batch_norm", {}, "unknown operator 'batch_norm'; known are layer_norm_backward, group_norm_backward, "),
        (
            "batch_norm_stats",
            {"actual": {**STATISTICS, "var": 0}},
            "var: no result of batch_norm_stats, whose results are mean, invstd",
        ),
        ("batch_norm_stats", {"product": "Abacus"}, "unknown product 'Abacus'; known are "),
        ("batch_norm_stats", {"worst": -1}, "worst is -1, and must be 0 or more"),
    ],
)
def test_arguments_of_judge_that_are_wrong(operator: str, more: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"actual": STATISTICS, **more}
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        judge(operator, {"input": np.ones((2, 3), np.float32)}, **arguments)


def test_a_product_by_its_name() -> None:
    with pytest.raises(ContractError, match="Atlas inference has no aclnnBatchNormStats"):
        judge("batch_norm_stats", {"input": np.ones((2, 3), np.float32)}, STATISTICS, product="Ascend310P3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors(dtype: str) -> None:
    """A call and its results as PyTorch has them, gradients requested."""
    torch = pytest.importorskip("torch")
    x, grad_out = torch.randn(2, 8, 64, dtype=getattr(torch, dtype))
    mean, rstd = x.float().mean(1, keepdim=True), torch.ones(8, 1)
    call = {"grad_out": grad_out, "input": x.requires_grad_(), "normalized_shape": [64], "mean": mean, "rstd": rstd}
    names = ("grad_input", "grad_weight", "grad_bias")
    results = dict(zip(names, normgrad.layer_norm_backward(**{**call, "input": x.detach()}), strict=True))
    assert judge("layer_norm_backward", call, results)
    results["grad_bias"] = results["grad_bias"].requires_grad_() * 2
    assert found_of(judge("layer_norm_backward", call, results), "grad_bias")["factor"].startswith("all of them are 2")


def test_a_result_that_is_no_array() -> None:
    judgement = judge(
        "batch_norm_stats", {"input": np.ones((2, 3), np.float32)}, {**STATISTICS, "mean": [1.0, 1.0, 1.0]}
    )
    text = "is of type list, and must be a NumPy array, a PyTorch tensor or have __dlpack__"
    assert judgement.outputs[0].report.text == text
    with pytest.raises(TypeError, match=f"^actual {text}"):
        compare([1.0], [1.0])


def test_a_judgement_prints_its_verdicts() -> None:
    judgement = judge("batch_norm_stats", {"input": np.ones((2, 3), np.float32)}, STATISTICS)
    assert repr(judgement) == "<Judgement of batch_norm_stats by strict: mean FAIL, invstd FAIL>"
    wrong = "0 of 3 elements within the bound; the worst error is 1.86e+06 of it; worst at (0,): 0 for 1"
    assert repr(judgement.outputs[0]) == f"<OutputJudgement of mean float32 (3,): FAIL; {wrong}>"
    lines = str(judgement).splitlines()
    assert lines[:2] == ["batch_norm_stats, standard strict", f"  FAIL  mean: {wrong}"]
    assert lines[2:4] == ["    everywhere: all 3 elements are wrong", "    zero: all of them are 0"]


def test_a_statistic_may_have_any_shape_of_its_size() -> None:
    case = one_case("group_norm")
    results = right_results(case)
    results["mean"] = results["mean"].reshape(3, 4, 1)
    assert judge("group_norm", case.arguments, results)


@pytest.mark.parametrize("kind", ["special", "constant", "one-column"])
def test_pages_and_json_of_odd_results(kind: str) -> None:
    case = one_case("layer_norm_backward", kind)
    results = right_results(case)
    results["grad_input"].flat[3] = np.nan
    judgement = judge("layer_norm_backward", case.arguments, results)
    assert not judgement
    json.dumps(judgement.as_json(), allow_nan=False)
    text = page("title", "<&>", [section(case.name, judgement, with_plots=True)], ORIGIN)
    assert text.count("<svg") == text.count("</svg>") == 9
    assert "&lt;&amp;&gt;" in text
    for outside in ("<script", "src=", "@import", "url("):
        assert outside not in text
    assert all(target.startswith("#") for target in re.findall("href=['\"]?([^ '\">]*)", text))
    assert "nan" not in "".join(part.split("</svg>")[0] for part in text.split("<svg")[1:])


# Pages


class Outline(HTMLParser):
    """The headings of a page with their levels, its links, and the ids that they lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[tuple[int, str]] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self._is_heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.ids.add(named.get("id") or "")
        if tag == "a":
            self.links.append(named["href"] or "")
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
            self._is_heading = True

    def handle_endtag(self, tag: str) -> None:
        self._is_heading = self._is_heading and not re.fullmatch("h[1-6]", tag)

    def handle_data(self, data: str) -> None:
        if self._is_heading:
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)


def a_page(*names: str, wrong: tuple[str, ...] = (), unjudged: tuple[str, ...] = ()) -> str:
    """A page of cases, some of them wrong, and some that cannot be judged."""
    case = one_case("batch_norm_stats")
    sections = []
    for name in names:
        results = right_results(case)
        if name in wrong:
            results["mean"] += 1
        judgement = judge("batch_norm_stats", case.arguments, results)
        sections.append(section(name, judgement, with_plots=name in wrong))
    return page("batch_norm_stats", "", [*sections, *(not_judged(name, "has no results") for name in unjudged)], ORIGIN)


def test_headings_are_nested() -> None:
    several = Outline(a_page("one", "two", wrong=("two",)))
    outputs = [(3, "mean"), (3, "invstd")]
    assert several.headings == [(1, "batch_norm_stats"), (2, "two"), *outputs, (2, "one"), *outputs]
    assert Outline(a_page("one")).headings == [(1, "batch_norm_stats"), (2, "mean"), (2, "invstd")]


def test_the_table_of_cases_leads_to_the_cases() -> None:
    outline = Outline(a_page("one", "two", "three", wrong=("two",)))
    assert len(outline.links) == len(set(outline.links)) == 3
    assert {link.removeprefix("#") for link in outline.links} <= outline.ids


def test_what_cannot_be_judged_is_no_failure() -> None:
    text = a_page("one", "two", wrong=("two",), unjudged=("three",))
    assert "3 cases: 1 passed, 1 failed, 1 could not be judged" in text
    assert text.count(">not judged</span>") == 2
    assert re.search(r">fail</span>3 cases", text)
    assert "fail</span>failed" not in a_page("one", wrong=("one",))


def test_a_page_says_where_it_comes_from() -> None:
    text = a_page("one")
    assert "normgrad 1.2.3, 2026-01-31T12:00:00+00:00" in text
    assert "<code>normgrad check &lt;op&gt; in out</code>" in text


def test_plots_are_explained() -> None:
    text = a_page("one", "two", wrong=("one",))
    assert text.count("½ ulp</text>") == 1  # of the output that is not off by millions of them
    assert text.count("The outermost bars of the histogram hold all errors beyond") == 1


def test_a_page_prints_whole() -> None:
    rules = CSS.partition("@media print")[2]
    for rule in ("repeat(3, 1fr)", "overflow: visible", "details::details-content", "break-inside: avoid"):
        assert rule in rules


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb or #rgb, as WCAG defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES)
def test_text_has_the_contrast_of_wcag_aa(theme: str) -> None:
    colours = dict(re.findall(r"--([\w-]+): *(#[0-9a-f]+)", THEMES[theme]))
    for text, behind in TEXT_ON:
        light, dark = sorted((luminance(colours[text]), luminance(colours[behind])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, behind)


def test_every_colour_of_text_is_among_those_checked() -> None:
    used = re.findall(r"(?<![\w-])(?:color|fill): *var\(--([\w-]+)\)", CSS)
    assert set(used) <= {text for text, _ in TEXT_ON} | {"dim", "good", "bad", "other"}  # those of plots
