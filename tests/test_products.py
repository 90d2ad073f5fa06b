"""Products: every cell of their table, how they are named, and how one is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import normgrad
from normgrad import ContractError, Product, use_product
from normgrad.contract.products import current_product, parse_product
from normgrad.testing.cases import make_cases
from support.dtypes import BF16, F16, F32, FLOATS
from support.processes import run_python
from support.refusals import INVALID, NO_KERNEL, OUTPUTS, a, base_call, check_error, planned

P = Product
OPERATORS = list(OUTPUTS)

#: The operators that a product lacks, and whether it has bfloat16.
TABLE = {
    P.ASCEND_950: ([], True),
    P.ATLAS_A3: ([], True),
    P.ATLAS_A2: ([], True),
    P.ATLAS_200I_500_A2: ([name for name in OPERATORS if name != "layer_norm"], False),
    P.ATLAS_INFERENCE: ([name for name in OPERATORS if name not in ("layer_norm_backward", "group_norm")], False),
    P.ATLAS_TRAINING: ([], False),
}
CELLS = [pytest.param(product, operator, id=f"{product.label}-{operator}") for product in P for operator in OPERATORS]
C_NAMES = {name: getattr(normgrad, name).signature.c_name for name in OPERATORS}


@pytest.mark.parametrize(("product", "operator"), CELLS)
def test_operators_of_a_product(product: Product, operator: str) -> None:
    with use_product(product):
        if operator not in TABLE[product][0]:
            planned(operator, base_call(operator)).run()
            return
        with pytest.raises(ContractError) as caught:
            planned(operator, base_call(operator))
    check_error(caught.value, operator, NO_KERNEL, None, f"{product.label} has no {C_NAMES[operator]};")


@pytest.mark.parametrize(
    ("product", "operator"),
    [(product, operator) for product, (lacks, _) in TABLE.items() for operator in OPERATORS if operator not in lacks],
)
def test_bfloat16_of_a_product(product: Product, operator: str) -> None:
    with use_product(product):
        if TABLE[product][1]:
            planned(operator, base_call(operator, BF16)).run()
            return
        with pytest.raises(ContractError) as caught:
            planned(operator, base_call(operator, BF16))
    first = "grad_out" if operator.endswith("backward") else "input"
    words = f"is bfloat16, and must be float32 or float16 .on {product.label}"
    check_error(caught.value, operator, INVALID, first, words)


_SAME = {(F32, F32), (F16, F16), (BF16, BF16)}
_MIXED = {*_SAME, (F16, F32), (BF16, F32)}
GROUP_NORM_PAIRS: dict[Product | None, set[tuple[str, str]]] = {
    None: _MIXED,
    P.ASCEND_950: _MIXED,
    P.ATLAS_A3: _SAME,
    P.ATLAS_A2: _SAME,
    P.ATLAS_TRAINING: _SAME - {(BF16, BF16)},
}


@pytest.mark.parametrize("product", GROUP_NORM_PAIRS, ids=lambda p: p.label if p else "no product")
@pytest.mark.parametrize("data", FLOATS)
@pytest.mark.parametrize("statistics", FLOATS)
def test_dtypes_of_group_norm(product: Product | None, data: str, statistics: str) -> None:
    call = base_call("group_norm_backward", data)
    for name in ("mean", "rstd"):
        call[name] = a(2, 3, dtype=statistics)
    for name in ("weight", "grad_weight", "grad_bias"):
        call[name] = a(6, dtype=statistics)
    with use_product(product):
        if (data, statistics) in GROUP_NORM_PAIRS[product]:
            planned("group_norm_backward", call).run()
            return
        with pytest.raises(ContractError) as caught:
            planned("group_norm_backward", call)
    lacking = product is P.ATLAS_TRAINING and data == BF16
    check_error(caught.value, "group_norm_backward", INVALID, "grad_out" if lacking else "mean", "and must be")
    if product is not None:
        assert product.label in str(caught.value)


@pytest.mark.parametrize("product", [P.ASCEND_950, P.ATLAS_A3, P.ATLAS_A2, P.ATLAS_TRAINING])
def test_the_weight_of_group_norm_has_the_statistics_dtype(product: Product) -> None:
    call = base_call("group_norm_backward", F16)
    call["weight"] = a(6)
    with use_product(product), pytest.raises(ContractError, match=r"weight is float32, .*\(mean's dtype\)"):
        planned("group_norm_backward", call)


def test_group_norms_own_statistics_have_the_dtype_that_the_product_wants() -> None:
    x = a(2, 6, 5, dtype=F16)
    with use_product("Atlas A2"):
        assert normgrad.group_norm(x, None, None, 2, 6, 5, 3)[1].dtype == np.float16
    with use_product("Ascend 950"):
        assert normgrad.group_norm(x, None, None, 2, 6, 5, 3)[1].dtype == np.float32


NAMES = {
    P.ASCEND_950: ["Ascend 950", "ascend 950", "Ascend950", "Ascend950PR_9599", "Ascend950DT"],
    P.ATLAS_A3: ["Atlas A3", "ATLAS A3", "Ascend910_93", "Ascend910_9391"],
    P.ATLAS_A2: [
        "Atlas A2",
        " atlas a2 ",
        "Ascend910B1",
        "Ascend910B2",
        "Ascend910B2C",
        "Ascend910B3",
        "Ascend910B4-1",
    ],
    P.ATLAS_200I_500_A2: ["Atlas 200I/500 A2", "atlas 200i/500 a2", "Ascend310B", "Ascend310B4"],
    P.ATLAS_INFERENCE: ["Atlas inference", "ATLAS INFERENCE", "Ascend310P", "Ascend310P3"],
    P.ATLAS_TRAINING: ["Atlas training", "Ascend910A", "Ascend910ProA", "Ascend910ProB", "Ascend910B"],
}


@pytest.mark.parametrize(("product", "name"), [(product, name) for product, names in NAMES.items() for name in names])
def test_names(product: Product, name: str) -> None:
    assert parse_product(name) is product
    assert parse_product(product) is product


UNKNOWN = [
    "",
    "Ascend",
    "Ascend910",
    "Ascend910BX",
    "Ascend910B5",
    "Ascend310",
    "ascend910b3",
    "Atlas",
    910,
    b"Atlas A2",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_answered_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ValueError, match="unknown product") as caught:
        parse_product(name)
    text = str(caught.value)
    assert not isinstance(caught.value, ContractError)
    assert all(product.label in text for product in P)
    assert all(soc in text for soc in ("Ascend950", "Ascend910_93", "Ascend910B4", "Ascend310B", "Ascend910Pro"))


def test_every_place_that_takes_a_product_refuses_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, statistics = a(3, 4), a(3, 1)
    with pytest.raises(ValueError, match="unknown product 'X'"):
        normgrad.layer_norm_backward(x, x, [4], statistics, statistics, product="X")
    with pytest.raises(ValueError, match="unknown product 'X'"):
        use_product("X")
    assert current_product() is None
    monkeypatch.setenv("NORMGRAD_PRODUCT", "X")
    with pytest.raises(ValueError, match="unknown product 'X'"):
        normgrad.layer_norm_backward(x, x, [4], statistics, statistics)


def _group_norm(**more: Any) -> Any:
    x, statistics = a(2, 6, 5), a(2, 3)
    return normgrad.group_norm_backward(x, x, statistics, statistics, None, 2, 6, 5, 3, **more)


def test_the_product_of_one_call() -> None:
    for product in (P.ATLAS_INFERENCE, "atlas inference", "Ascend310P3"):
        with pytest.raises(ContractError) as caught:
            _group_norm(product=product)
        assert caught.value.status == NO_KERNEL
    _group_norm()


def test_use_product_as_a_function_holds_from_then_on() -> None:
    use_product("Atlas inference")
    with pytest.raises(ContractError, match="Atlas inference"):
        _group_norm()
    use_product(None)
    _group_norm()


def test_one_use_product_in_several_blocks() -> None:
    choice = use_product("Atlas A2")
    for _ in range(2):
        with choice as product, use_product(None), choice:
            assert current_product() is product is P.ATLAS_A2
        assert current_product() is None
    with choice, use_product(None):
        with choice:
            pass
        assert current_product() is None


def test_use_product_in_a_block_ends_with_it() -> None:
    with use_product("Atlas inference") as product:
        assert product is P.ATLAS_INFERENCE
        with use_product("Atlas A2"):
            _group_norm()
            with use_product(None):
                assert current_product() is None
        assert current_product() is P.ATLAS_INFERENCE
    assert current_product() is None
    with pytest.raises(KeyError), use_product("Atlas A2"):
        raise KeyError
    assert current_product() is None


def test_a_calls_own_product_goes_before_the_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMGRAD_PRODUCT", "Ascend310P3")
    with pytest.raises(ContractError, match="Atlas inference"):
        _group_norm()
    _group_norm(product="Atlas A2")
    with use_product(None):
        _group_norm()
    with use_product("Ascend310B"), pytest.raises(ContractError, match="200I/500 A2"):
        _group_norm()


def test_the_environment_of_a_new_process() -> None:
    code = "from normgrad.contract.products import current_product; print(current_product().label)"
    assert run_python(code, NORMGRAD_PRODUCT="Ascend910B").strip() == "Atlas training"


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_takes_a_product(name: str) -> None:
    """Every one by the same keyword, the forward passes too."""
    arguments = next(iter(make_cases(name, kinds=["normal"]))).arguments
    with pytest.raises(ValueError, match="unknown product 'Abacus'"):
        getattr(normgrad, name)(**arguments, product="Abacus")
    assert getattr(normgrad, name)(**arguments, product="Ascend 950") is not None
    assert current_product() is None


def test_products_and_choices_print_their_names():
    assert repr(Product.ATLAS_A2) == "<Product.ATLAS_A2: 'Atlas A2'>"
    with use_product("Ascend310P3") as product:
        assert repr(product) == "<Product.ATLAS_INFERENCE: 'Atlas inference'>"
    for name, text in (("atlas a3", "<use_product: Atlas A3>"), (None, "<use_product: none>")):
        choice = use_product(name)
        with choice:
            assert repr(choice) == text
