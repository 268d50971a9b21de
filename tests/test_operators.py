"""Each public function is one operator of a graph, with fixed and with dynamic shapes, whichever part of a compiler runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from api_calls import CU, DENSE, FLAT, PAGED, STORE, VARLEN, Q
from sampled_cases import ALL
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask

import fa_serve
from fa_serve import api, operators
from fa_serve.backends.calls import CallOptions
from fa_serve.testing import cu_seqlens, make_paged, make_qkv

COMPILERS = ("eager", "aot_eager", "inductor")
# inductor takes the graph of aot_eager; what it does in its own way is to write in place
NOTHING_WRITTEN = ("eager", "inductor" if ALL else "aot_eager")
SLOPES = torch.linspace(0.1, 0.9, 4)


def options_of(**given: Any) -> tuple[Any, ...]:
    """The last arguments of each operator but `store_kv`: all options of a call, of which some are given."""
    return operators._flat(CallOptions(**given))


def larger(name: str) -> dict[str, Any]:
    """A call of each function in other sizes than those of `api_calls`."""
    q, k, v = make_qkv(3, 9, 11, 4, 2, 16)
    flat = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)}
    cu = {"cu_seqlens_q": cu_seqlens([9] * 3), "cu_seqlens_k": cu_seqlens([11] * 3), "max_seqlen_q": 9, "max_seqlen_k": 11}
    k_cache, v_cache, table, used = make_paged(list(k), list(v), 4)
    paged = {"q": flat["q"], "k_cache": k_cache, "v_cache": v_cache, "block_table": table, "seqused_k": used}
    store = {"k": flat["k"][:4], "v": flat["v"][:4], "k_cache": k_cache, "v_cache": v_cache}
    return {
        "attention": {"q": q, "k": k, "v": v},
        "attention_varlen": flat | cu,
        "attention_paged": paged | {"cu_seqlens_q": cu["cu_seqlens_q"], "max_seqlen_q": 9},
        "store_kv": store | {"slot_mapping": torch.tensor([5, -1, 2, 0])},
    }[name]


def sizes_for(compiler: str, dynamic: bool) -> int:
    """How many sizes of a call are tried. A second fixed size is a second program for the C++ compiler, which takes seconds,
    and what compiles again is the part before inductor."""
    return 1 if compiler == "inductor" and not dynamic else 2


def recorder(compiler: str, nodes: list[str]) -> Any:
    """A compiler that also writes down the operators of the graph that it is given."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("fa_serve"))
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    return compile_graph


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", NOTHING_WRITTEN)
@pytest.mark.parametrize("function", [DENSE, VARLEN, PAGED], ids=lambda call: call[0].__name__)
@torch.no_grad()
def test_attention_is_one_node(function: tuple[Callable[..., Any], dict[str, Any]], compiler: str, dynamic: bool) -> None:
    call, arguments = function
    options = {"causal": True, "return_lse": True, "sinks": torch.linspace(-1, 1, 4), "alibi_slopes": SLOPES, "softcap": 5.0}
    nodes: list[str] = []
    compiled = torch.compile(
        lambda **given: call(**given, **options), fullgraph=True, backend=recorder(compiler, nodes), dynamic=dynamic
    )
    for given in (arguments, larger(call.__name__)):
        out, lse = compiled(**given)
        expected, expected_lse = call(**given, **options)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    assert set(nodes) == {f"fa_serve.{call.__name__}.default"}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("function", [DENSE, VARLEN, PAGED], ids=lambda call: call[0].__name__)
@torch.no_grad()
def test_out_is_written_in_a_graph(function: tuple[Callable[..., Any], dict[str, Any]], compiler: str, dynamic: bool) -> None:
    """What is written to `out` is seen by the operations behind the call, and by the caller."""
    call, arguments = function

    def step(out: Tensor, given: dict[str, Any]) -> Tensor:
        before = out + 1
        call(**given, causal=True, out=out)
        return before + out

    compiled = torch.compile(step, fullgraph=True, backend=compiler, dynamic=dynamic)
    for given in (arguments, larger(call.__name__))[: sizes_for(compiler, dynamic)]:
        expected = call(**given, causal=True)
        out = torch.full_like(given["q"], 2.0)
        torch.testing.assert_close(compiled(out, given), expected + 3.0)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", COMPILERS)
@torch.no_grad()
def test_store_kv_writes_in_a_graph(compiler: str, dynamic: bool) -> None:
    """What is written is seen by the operations behind the call, and by the caller. Both caches may be views of one tensor.

    Inductor of torch 2.13 loses the offset of a view of an input of dynamic shape, for any operator that writes to it.
    """
    are_views = not (dynamic and compiler == "inductor")

    def step(caches: list[Tensor] | Tensor, given: dict[str, Any]) -> Tensor:
        before = caches[0].sum() + caches[1].sum()
        fa_serve.store_kv(given["k"], given["v"], caches[0], caches[1], given["slot_mapping"])
        return caches[0].sum() + caches[1].sum() - before

    nodes: list[str] = []
    compiled = torch.compile(step, fullgraph=True, backend=recorder(compiler, nodes), dynamic=dynamic)
    for given in (STORE[1], larger("store_kv"))[: sizes_for(compiler, dynamic)]:
        expected = torch.zeros(2, *given["k_cache"].shape)
        caches: list[Tensor] | Tensor = expected.clone()
        if not are_views:
            caches = [x.clone() for x in caches]
        difference = step(expected, given)
        torch.testing.assert_close(compiled(caches, given), difference)
        for actual, wanted in zip(caches, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
        assert difference != 0
    assert set(nodes) == {"fa_serve.store_kv.default"}


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_paged", "store_kv"])
@torch.no_grad()
def test_operators_keep_their_promises(name: str) -> None:
    """PyTorch's own check: the schema says what is written, and the fake kernel knows the shapes."""
    slopes_and_sinks = (torch.linspace(-1, 1, 4), SLOPES)
    options = options_of(causal=True, window_size=(-1, 0), return_lse=True)
    q, k, v = DENSE[1].values()
    lengths = (CU["cu_seqlens_q"], CU["cu_seqlens_k"], 5, 7)
    paged = PAGED[1]
    cache = (paged["k_cache"], paged["v_cache"])
    table = (paged["cu_seqlens_q"], paged["seqused_k"], paged["block_table"], None, None, 5, None, 0)
    arguments: dict[str, tuple[Any, ...]] = {
        "attention": (q, k, v, *slopes_and_sinks, None, *options),
        "attention_varlen": (*FLAT.values(), *slopes_and_sinks, *lengths, *options),
        "attention_paged": (paged["q"], *cache, *slopes_and_sinks, *table, *options),
        "store_kv": (*STORE[1].values(), None, None, "auto"),
    }
    given = tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments[name])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.fa_serve, name), given, test_utils=checks)
    if name != "store_kv":
        out = torch.zeros_like(given[0])
        torch.library.opcheck(getattr(torch.ops.fa_serve, f"{name}_out"), (out, *given), test_utils=checks)


@torch.no_grad()
def test_without_lse_an_operator_returns_none_of_it() -> None:
    compiled = torch.compile(lambda q: fa_serve.attention(q, q, q), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(Q), fa_serve.attention(Q, Q, Q), rtol=0, atol=0)
    _, lse = torch.ops.fa_serve.attention(Q, Q, Q, None, None, None, *options_of())
    assert lse.shape == (0,)


@torch.no_grad()
def test_a_bad_argument_of_a_graph_is_named() -> None:
    compiled = torch.compile(lambda q: fa_serve.attention(q, q[:1], q[:1]), fullgraph=True, backend="eager")
    with pytest.raises(ValueError, match="k must have q's batch size 2, got 1"):
        compiled(Q)


def _dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return fa_serve.attention(q, k, v, sinks=sinks, mask=mask, softcap=3.0, causal=True, return_lse=True)  # type: ignore[return-value]


def _varlen(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    cu = cu_seqlens([3, 7])
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 7, "max_seqlen_k": 7}
    out = fa_serve.attention_varlen(q[0], k[0], v[0], sinks=sinks, causal=True, **ends)
    return out + mask.sum(), mask  # type: ignore[operator]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", COMPILERS[:2])
@pytest.mark.parametrize("function", [_dense, _varlen])
def test_gradients_of_a_graph(function: Callable[..., Any], compiler: str, dynamic: bool) -> None:
    """One node forward and one backward, with the gradients of the eager call, whether lse counts or not."""
    found = []
    for call in (function, torch.compile(function, fullgraph=True, backend=compiler, dynamic=dynamic)):
        generator = torch.Generator().manual_seed(1)
        shapes = ((1, 10, 4, 16), (1, 10, 2, 16), (1, 10, 2, 16), (4,), (1, 4, 10, 10))
        leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        out, lse = call(*leaves)
        weights = torch.randn(out.shape, generator=generator)
        found.append(torch.autograd.grad((out * weights).sum() + (lse * lse).sum(), leaves))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_an_operator() -> None:
    """PyTorch's own checks of a registration: schema, fake results, autograd."""
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 5, 7, 4, 2, 16))
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    options = options_of(causal=True, return_lse=True)
    torch.library.opcheck(torch.ops.fa_serve.attention.default, (q, k, v, sinks, None, None, *options))


def test_what_a_graph_cannot_differentiate_is_refused() -> None:
    q = Q.clone().requires_grad_()
    out, _ = torch.ops.fa_serve.attention(q, q, q, None, None, None, *options_of())
    with pytest.raises(ValueError, match="return_lse must be True if gradients are needed"):
        out.sum().backward()
    slopes = SLOPES.clone().requires_grad_()
    out, _ = torch.ops.fa_serve.attention(q, q, q, None, slopes, None, *options_of(return_lse=True))
    with pytest.raises(fa_serve.UnsupportedError, match="alibi_slopes have no gradient in a compiled graph"):
        out.sum().backward()


LISTS = fa_serve.BlockLists.from_blocks(torch.tensor([True, False, True]).view(1, 1, 1, 3), (64, 64))


@pytest.mark.parametrize("compiler", NOTHING_WRITTEN)
@pytest.mark.parametrize("layout", ["dense", "varlen", "paged"])
@torch.no_grad()
def test_block_sparse_calls_are_one_node(layout: str, compiler: str) -> None:
    q, k, v = make_qkv(2, 50, 150, 4, 2, 16)
    cu = {"cu_seqlens_q": cu_seqlens([50, 50]), "max_seqlen_q": 50}
    k_cache, v_cache, table, used = make_paged(list(k), list(v), 4)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    pages = {"k_cache": k_cache, "v_cache": v_cache, "block_table": table, "seqused_k": used}
    call, given = {
        "dense": (fa_serve.attention, {"q": q, "k": k, "v": v}),
        "varlen": (
            fa_serve.attention_varlen,
            {**dict(zip("qkv", flat, strict=True)), **cu, "cu_seqlens_k": cu_seqlens([150, 150]), "max_seqlen_k": 150},
        ),
        "paged": (fa_serve.attention_paged, {"q": flat[0], **pages, **cu}),
    }[layout]
    nodes: list[str] = []
    compiled = torch.compile(
        lambda lists, **given: call(**given, block_mask=lists, causal=True, return_lse=True),
        fullgraph=True,
        backend=recorder(compiler, nodes),
    )
    out, lse = compiled(LISTS, **given)
    expected, expected_lse = call(**given, block_mask=LISTS, causal=True, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    assert not torch.equal(out, call(**given, causal=True))
    buffer = torch.zeros_like(out)
    torch.compile(lambda out: call(**given, block_mask=LISTS, causal=True, out=out), fullgraph=True, backend="eager")(buffer)
    torch.testing.assert_close(buffer, expected, rtol=0, atol=0)
    assert set(nodes) == {"fa_serve.attention_block_sparse.default"}


@torch.no_grad()
def test_block_masks_of_flex_attention_are_read_in_a_graph() -> None:
    q, k, v = make_qkv(1, 150, 150, 4, 2, 16)
    mask = BlockMask.from_kv_blocks(*(x[:, :, :1].expand(-1, -1, 2, *x.shape[3:]).contiguous() for x in LISTS.tensors[:2]))
    compiled = torch.compile(lambda mask: fa_serve.attention(q, k, v, block_mask=mask), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(mask), fa_serve.attention(q, k, v, block_mask=mask), rtol=0, atol=0)


def test_the_block_sparse_operator_keeps_its_promises() -> None:
    q, k, v = make_qkv(1, 50, 150, 4, 2, 16)
    middle = (None, *[None] * 5, *LISTS.tensors, 64, 64, None, None, 0)
    given = (q, k, v, None, None, *middle, *options_of(return_lse=True))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fa_serve.attention_block_sparse, given, test_utils=checks)
    torch.library.opcheck(torch.ops.fa_serve.attention_block_sparse_out, (torch.zeros_like(q), *given), test_utils=checks)
    out, _ = torch.ops.fa_serve.attention_block_sparse(q.requires_grad_(), *given[1:])
    with pytest.raises(fa_serve.UnsupportedError, match="a call with a block_mask has no gradient in a compiled graph"):
        out.sum().backward()


@torch.no_grad()
def test_eager_calls_do_not_use_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher costs more than a plan that is found."""
    for name in ("attention", "attention_varlen", "attention_paged", "attention_block_sparse", "store_kv"):
        monkeypatch.setattr(operators, name, None)
    for function, arguments in (DENSE, VARLEN, PAGED, STORE):
        function(**arguments)


def test_a_call_is_eager_unless_something_records_or_transforms_it() -> None:
    """What this question misses would compute where it should be recorded: it covers all that `is_traced` and `is_transformed`
    ask for."""
    found: list[bool] = []

    def note(x: Tensor) -> Tensor:
        found.append(operators.is_eager())
        return x * 1

    x = torch.ones(2)
    note(x)
    torch.func.vmap(note)(x)
    with forward_ad.dual_level():
        note(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_is_jit_tracing", lambda: True)
        note(x)
    assert found == [True, False, False, False]
    assert torch.compile(lambda x: x + operators.is_eager(), backend="eager", fullgraph=True)(x).tolist() == [1, 1]
    assert operators.is_eager()


def test_an_eager_call_asks_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms in which a call may be recorded cost time at each call."""
    for question in ("is_traced", "is_transformed"):
        monkeypatch.setattr(api, question, lambda *call: pytest.fail("the call was taken for one that is recorded"))
    q, k, v = make_qkv(1, 4, 4, 2, 2, 16)
    fa_serve.attention(q, k, v)
