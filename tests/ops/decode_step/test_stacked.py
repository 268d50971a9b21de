"""What a layer of a stack hands to the kernel, and what must be equal in all of them."""

from __future__ import annotations

from decode_step_cases import StepCase, make_layers

from fa_serve.ops.decode_step.kernel import ADDRESSES

CASE = StepCase(head_norms=True, qkv_bias=True)


def test_a_layer_has_all_that_the_table_asks_for_but_the_caches() -> None:
    layer = make_layers(CASE)[0]
    weights = layer.weights()
    assert [*weights, "k_cache", "v_cache"] == list(ADDRESSES)
    assert weights["down"] is layer.down
    assert layer.k_norm is not None
    assert weights["k_norm"] is layer.k_norm.weight
    assert layer._replace(k_norm=None).weights()["k_norm"] is None


def test_layers_may_differ_in_the_values_of_their_weights_alone() -> None:
    first, second = make_layers(CASE)
    assert first.constants() == second.constants()
    assert first.constants() != second._replace(qkv_bias=None).constants()
    assert first.constants() != second._replace(before_mlp=second.before_mlp._replace(eps=1e-3)).constants()
    assert first.constants() != second._replace(o=second.o.half()).constants()
