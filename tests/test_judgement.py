"""The full report: patterns, worst elements, quantiles; on inputs that the generator makes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from normgrad.contract.dtypes import numpy_dtype
from normgrad.operators import OPERATORS
from normgrad.reference import rounded
from normgrad.testing import judge, terms
from normgrad.testing.cases import TestCase, make_cases
from normgrad.testing.clusters import clusters
from normgrad.testing.expected import checked, exact_results, results_of
from normgrad.testing.layout import Layout, layout_of
from normgrad.testing.page import page, section


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
    text = page("title", "", [section(case.name, judgement, with_plots=False)])
    assert f"<td class=n>{element.total:.4g}</td><td class=n>{element.underflow:.4g}</td>" in text


def patterns(shape: tuple[int, int], wrong: object, **more: int) -> list[tuple[str, str]]:
    """The patterns of a result of rows with wrong elements at an index."""
    is_wrong = np.zeros(shape, bool)
    is_wrong[wrong] = True
    layout = Layout(shape[1], **({"channels": shape[1]} | more))
    return [(cluster.kind, cluster.text) for cluster in clusters(np.ravel(is_wrong), layout)]


def test_rows() -> None:
    assert patterns((64, 100), np.s_[5:8]) == [("row", "in 3 rows 5–7 of 64")]
    assert patterns((64, 100), np.s_[63, ::3]) == [("row", "in row 63 of 64")]


def test_channels() -> None:
    assert patterns((64, 100), np.s_[:, [3, 40]]) == [("channel", "in 2 channels 3, 40 of 100")]
    assert patterns((8, 60), np.s_[:, 12:24], channels=5, places=12) == [("channel", "in channel 1 of 5")]


def test_tails() -> None:
    ((kind, text),) = patterns((64, 100), np.s_[:, 96:])
    assert (kind, text) == (
        "tail",
        "in the last 4 of the 100 elements of rows, where blocks of 8 to 32 leave some over",
    )


def test_blocks() -> None:
    ((kind, text),) = patterns((64, 256), np.s_[:, 7::16])
    assert (kind, text) == ("block", "at place 7 of 16 of every block of 16 elements of a row")


def test_everywhere_and_nowhere() -> None:
    assert [kind for kind, _ in patterns((64, 100), np.s_[:, ::])] == ["everywhere"]
    assert patterns((64, 100), np.s_[:0]) == []


@pytest.mark.parametrize("count", [1, 2, 5, 50, 500, 2000])
def test_chance_is_no_pattern(count: int) -> None:
    for seed in range(20):
        places = np.random.default_rng(seed).choice(6400, count, replace=False)
        found = patterns((64, 100), np.unravel_index(places, (64, 100)))
        assert [kind for kind, _ in found] == ["scattered"], (seed, found)


def test_layouts() -> None:
    layer, group = (one_case(f"{name}_norm_backward").arguments for name in ("layer", "group"))
    assert layout_of(layer, 33 * 515) == Layout(515, 515)
    assert layout_of(layer, 515) == Layout(515)
    assert layout_of(group, 3 * 24 * 187) == Layout(6 * 187, 24, 187)
    batch = one_case("batch_norm_elemt").arguments
    assert layout_of(batch, 6 * 19 * 77) == Layout(77, 19, 77)


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
    assert "is missing" in section("case", judgement, with_plots=True).body


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
    text = page("title", "<&>", [section(case.name, judgement, with_plots=True)])
    assert text.count("<svg") == text.count("</svg>") == 9
    assert "&lt;&amp;&gt;" in text
    for outside in ("<script", "src=", "href=", "@import", "url("):
        assert outside not in text
    assert "nan" not in "".join(part.split("</svg>")[0] for part in text.split("<svg")[1:])
