"""A model that is divided between ranks computes the same, each rank keeps its part alone, and what would change is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantise
import torch
from hf_families import BY_NAME
from latent_families import LATENT
from rank_threads import run_ranks
from sampled_cases import each_nth
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fa_serve.engine.cache import tensors as kv_cache
from fa_serve.hf import NAME, model_layers, patch, plan_division, vocab_size
from fa_serve.hf.adapter.paged import OneSequence, PagedBatch, paged_forward
from fa_serve.hf.info import RankShare, describe
from fa_serve.hf.surgery.divide.weights import divide_model
from fa_serve.hf.surgery.fuse.fusion import cached_layers, fuse_layers
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear, finish_weights, with_quantized_linears
from fa_serve.spec import UnsupportedModelError

CPU = torch.device("cpu")
FUSED = (
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "granite",
    "smollm3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3-moe",
    "mistral",
    "minicpm3",
)
# layers that are not fused, or whose attention transformers' plan leaves whole
OTHERS = ("olmo2", "olmo3", "starcoder2", "cohere2", "gemma4", "deepseek-v3", "deepseek-v2-lite")


def patched(name: str) -> PreTrainedModel:
    model = (BY_NAME | {family.name: family for family in LATENT})[name].build()
    patch(model)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, batch: Any = None) -> Tensor:
    ids = torch.arange(5, 20)
    return paged_forward(model, ids, torch.arange(15), batch or OneSequence(), torch.arange(15))


def divided(model: PreTrainedModel, size: int, work: Any) -> list[Any]:
    division = plan_division(model, size)

    def run(rank: int, all_reduce: Any) -> Any:
        own = copy.deepcopy(model)
        divide_model(own, division, rank, all_reduce, CPU)
        return work(own, all_reduce)

    return run_ranks(size, run)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in (*each_nth(12, FUSED), *OTHERS)),
        *((name, 4) for name in (*each_nth(3, FUSED), *each_nth(2, OTHERS))),
    ],
)
def test_a_family_on_two_and_four_ranks(name: str, size: int) -> None:
    """There are two key and value heads, which four ranks share. The next test has all of FUSED on two ranks."""
    model = patched(name)
    expected = logits(model)
    results = divided(model, size, lambda own, _: (logits(own), sum(p.numel() for p in own.model.layers.parameters())))
    for actual, count in results:
        assert torch.equal(actual, results[0][0]), "every rank has the same bits"
        assert float((actual - expected).abs().max()) <= 2e-6 * float(expected.abs().max())
        assert count < sum(p.numel() for p in model.model.layers.parameters())


@pytest.mark.parametrize("name", FUSED)
def test_divided_layers_are_fused(name: str) -> None:
    """The fused form of a rank's layer is proven against the rank's own, without the other ranks."""
    model = patched(name)
    expected = logits(model)

    def work(own: PreTrainedModel, all_reduce: Any) -> tuple[int, Tensor]:
        before = all_reduce.calls
        fused = fuse_layers(own)
        assert all_reduce.calls == before + 5, "one forward, for what layers are given; no proof waits for other ranks"
        return fused, logits(own, one_sequence_in_pages(own))

    for fused, actual in divided(model, 2, work):
        assert fused == 2
        assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def one_sequence_in_pages(model: PreTrainedModel) -> PagedBatch:
    """15 tokens in two pages of eight."""
    layers = cached_layers(model, model_layers(model).attention)
    return PagedBatch(
        kv_caches=kv_cache.allocate(layers, 2, 8, CPU),
        slot_mapping=torch.arange(15),
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
        seqused_k=torch.tensor([15], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 15], dtype=torch.int32),
        max_seqlen_q=15,
        max_seqlen_k=15,
    )


def test_a_divided_norm_keeps_a_layer_from_being_fused(caplog: pytest.LogCaptureFixture) -> None:
    model = patched("olmo2")
    assert divided(model, 2, lambda own, _: fuse_layers(own)) == [0, 0]
    assert "the forward of a norm is replaced by PartOfOutput" in caplog.text
    assert not any(isinstance(layer.forward, FusedLayer) for layer in model.model.layers)


def test_a_rank_keeps_its_own_rows_and_columns() -> None:
    model = patched("llama")
    attention = model.model.layers[0].self_attn

    def work(own: PreTrainedModel, _: Any) -> Any:
        mine = own.model.layers[0].self_attn
        assert (mine.q_proj.out_features, mine.o_proj.in_features) == (32, 32)
        assert mine.q_proj.weight.untyped_storage().nbytes() == 32 * 64 * 4, "the whole weight is not kept"
        return mine.q_proj.weight, mine.o_proj.weight

    (q0, o0), (q1, o1) = divided(model, 2, work)
    assert torch.equal(torch.cat([q0, q1]), attention.q_proj.weight)
    assert torch.equal(torch.cat([o0, o1], dim=1), attention.o_proj.weight)


@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
def test_the_vocabulary_is_divided(tied: bool) -> None:
    model = BY_NAME["llama"].build(tie_word_embeddings=tied, pad_token_id=95)
    patch(model)
    assert model.model.embed_tokens.padding_idx == 95, "a row of the last rank"
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    expected = logits(model)

    def work(own: PreTrainedModel, _: Any) -> Any:
        assert (own.lm_head.weight is own.model.embed_tokens.weight) == tied
        assert (vocab_size(own), own.model.embed_tokens.num_embeddings) == (96, 24)
        return logits(own), own.model.embed_tokens.weight, own.lm_head.weight

    results = divided(model, 4, work)
    assert all(torch.equal(actual, results[0][0]) for actual, _, _ in results)
    assert float((results[0][0] - expected).abs().max()) <= 2e-6 * float(expected.abs().max())
    assert [tuple(weight.shape) for _, weight, _ in results] == [(24, 64)] * 4
    assert torch.equal(torch.cat([weight for _, weight, _ in results]), model.model.embed_tokens.weight)
    assert torch.equal(torch.cat([weight for _, _, weight in results]), model.lm_head.weight)


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    model = BY_NAME["llama"].build(vocab_size=97)
    patch(model)
    expected = logits(model)
    for actual, rows in divided(model, 2, lambda own, _: (logits(own), own.lm_head.weight.shape[0])):
        assert rows == 97
        assert float((actual - expected).abs().max()) <= 2e-6 * float(expected.abs().max())


def test_a_layer_that_would_change_is_refused() -> None:
    """GPT-NeoX keeps q, k and v of each head together. The plan takes them for all queries, all keys and all values."""
    refusal = (
        r"gpt_neox.layers.0 \(GPTNeoXLayer\) gives a different result when divided: the difference is [0-9.]+ times the largest"
    )
    with pytest.raises(UnsupportedModelError, match=refusal):
        divided(patched("gpt-neox"), 2, lambda own, _: None)


class OverAllFeatures(nn.Module):
    """An activation that reads every feature of a token, so ranks that have some of them compute something else."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)


def test_a_layer_that_differs_in_the_type_of_a_submodule_is_proven_by_itself() -> None:
    model = patched("llama")
    model.model.layers[1].mlp.act_fn.__class__ = OverAllFeatures  # its settings are those of the other layer
    refusal = r"model.layers.1 \(LlamaDecoderLayer\) gives a different result when divided"
    with pytest.raises(UnsupportedModelError, match=refusal):
        divided(model, 2, lambda own, _: None)


def test_a_forward_that_was_replaced_before_is_kept() -> None:
    """Layers give their input on while it is observed what they are given."""
    model = patched("llama")
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    replaced = layer.forward
    run_ranks(1, lambda rank, all_reduce: divide_model(model, plan_division(model, 1), rank, all_reduce, CPU))
    assert layer.forward is replaced


def test_a_model_whose_layers_cannot_be_left_out_is_refused() -> None:
    model = patched("llama")
    division = plan_division(model, 2)
    model.model.norm.forward = None
    with pytest.raises(
        UnsupportedModelError, match="between 2 ranks: a forward in which no layer computes fails with TypeError: "
    ):
        run_ranks(2, lambda rank, all_reduce: divide_model(model, division, rank, all_reduce, CPU))


def test_a_layer_that_fails_is_refused() -> None:
    model = patched("llama")
    division = plan_division(model, 2)
    division.layers["model.layers.0"].sums.remove("mlp.down_proj")
    del division.layers["model.layers.0"].cuts["mlp.down_proj.weight"]
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0 \(LlamaDecoderLayer\) fails with RuntimeError: "):
        run_ranks(2, lambda rank, all_reduce: divide_model(copy.deepcopy(model), division, rank, all_reduce, CPU))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that gives the folder of a small Qwen 2 in a format, whose key and value projections have biases."""
    folder = tmp_path_factory.mktemp("quantised")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            model = BY_NAME["qwen2"].build(
                hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2
            )
            quantise.write(model, name, folder / name, 64)
        return folder / name

    return make


def loaded(folder: Path) -> PreTrainedModel:
    """The model with the tensors of its checkpoint, which `divide` converts."""
    config = with_quantized_linears(AutoConfig.from_pretrained(folder), None)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=NAME
    )
    return model


@pytest.mark.parametrize("name", ["awq", "gptq", "pack-quantized", "fp8", "fp8-static", "fp8-block"])
def test_quantised_weights_on_two_ranks(name: str, quantised: Callable[[str], Path]) -> None:
    model = loaded(quantised(name))
    whole = copy.deepcopy(model)
    finish_weights(whole)
    matrices = {path: m.weight.dequantize(torch.float32) for path, m in whole.named_modules() if isinstance(m, QuantizedLinear)}
    expected = logits(whole)

    def work(own: PreTrainedModel, _: Any) -> Any:
        finish_weights(own)
        kept = {path: m.weight for path, m in own.named_modules() if isinstance(m, QuantizedLinear)}
        assert fuse_layers(own) == 2
        return logits(own, one_sequence_in_pages(own)), kept

    (first, kept0), (second, kept1) = divided(model, 2, work)
    assert torch.equal(first, second)
    assert float((first - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    for path, matrix in matrices.items():
        dim = 1 if path.endswith(("o_proj", "down_proj")) else 0
        parts = [kept[path].dequantize(torch.float32) for kept in (kept0, kept1)]
        assert torch.equal(torch.cat(parts, dim), matrix), path
        data = kept0[path].data
        assert data.untyped_storage().nbytes() == data.nbytes, "the whole weight is not kept"


def test_groups_that_ranks_would_share_are_refused(quantised: Callable[[str], Path]) -> None:
    gptq = loaded(quantised("gptq-act-order"))
    with pytest.raises(UnsupportedModelError, match=r"the columns of model.layers.0.self_attn.o_proj .* \(act-order\)"):
        plan_division(gptq, 2)
    block = loaded(quantised("fp8-block"))
    with pytest.raises(
        UnsupportedModelError,
        match=r"the 256 columns of model.layers.0.self_attn.o_proj \(rule 'rowwise'\) cannot be divided by 4: "
        r"128 columns share a scale \(float8 with a scale for each 128 x 128\)",
    ):
        plan_division(block, 4)
    hidden = loaded(quantised("gptq-act-order"))
    for module in hidden.modules():
        if isinstance(module, QuantizedLinear):
            module.scheme = replace(module.scheme, ordered=False)  # a config that does not say so
    with pytest.raises(UnsupportedModelError, match=r"columns \d+ to \d+ must be whole groups of 64 neighbouring columns"):
        divided(hidden, 2, lambda own, _: None)


def test_what_each_rank_holds_of_quantised_weights(quantised: Callable[[str], Path]) -> None:
    share = describe(str(quantised("gptq")), tensor_parallel=2).share
    assert isinstance(share, RankShare)
    vocabulary = 2 * 96 * 256 * 2  # embeddings and head, in bfloat16
    biases = 2 * (256 + 2 * 128) * 2  # of queries, keys and values
    shapes = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]  # q, k, v, o, gate, up, down
    numbers = 2 * sum(n * k for n, k in shapes)
    scales = numbers // 64
    # 4 bits a number; a scale of 2 bytes and a zero point of 4 bits a group. 4 bytes for the group of each column, which a rank
    # keeps for all columns unless it keeps some of them
    columns = 2 * 4 * sum(k for _, k in shapes)
    kept_columns = 2 * 4 * sum(k // 2 if place in (3, 6) else k for place, (_, k) in enumerate(shapes))
    assert share.total - share.whole - vocabulary - biases == numbers // 2 + scales * 2 + scales // 2 + columns
    assert share.divided == (vocabulary + biases + numbers // 2 + scales * 2 + scales // 2) // 2 + kept_columns
