"""Pooling, dense layers, layer norms: the numbers of sentence-transformers, and plain formulas where it is not installed."""

import numpy as np
import pytest
import torch
from encoder_folders import TEXTS, save_encoder
from safetensors.torch import save_file

from fa_serve.engine import Encoder, EngineConfig
from fa_serve.hf.encoders.folder import EncoderFolder, EncoderModule, read_folder
from fa_serve.hf.encoders.modules import TokenPooling, activation_of, load_modules, pool
from fa_serve.hf.encoders.packed import PackedInputs
from fa_serve.spec import ParameterError

MEAN = ("Pooling", {"pooling_mode_mean_tokens": True})
LINEAR = {"activation_function": "torch.nn.modules.linear.Identity"}
CPU = torch.device("cpu")
LENGTHS = [3, 1, 5]


@pytest.mark.parametrize(
    "modules",
    [
        [("Pooling", {f"pooling_mode_{mode}": True})]
        for mode in ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    ]
    + [
        [("Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True})],
        [MEAN, ("Dense", {"in_features": 32, "out_features": 20}), ("Normalize", {})],
        [MEAN, ("Dense", {"in_features": 32, "out_features": 32, "bias": False, "use_residual": True, **LINEAR})],
        [MEAN, ("LayerNorm", {"dimension": 32})],
    ],
    ids=["cls", "max", "sqrt", "weighted", "last", "two", "dense", "residual", "norm"],
)
def test_modules_are_those_of_sentence_transformers(tmp_path, modules) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    path = save_encoder(tmp_path, "bert", modules)
    encoder = Encoder(EngineConfig(model=path, device="cpu", dtype="float32"))
    wanted = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(list(TEXTS))
    found = encoder.encode(TEXTS)
    assert found.shape == wanted.shape == (len(TEXTS), encoder.card.size)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture
def packed() -> tuple[torch.Tensor, PackedInputs]:
    ids = np.arange(sum(LENGTHS))
    hidden = torch.randn(len(ids), 6, generator=torch.Generator().manual_seed(0))
    return hidden, PackedInputs.of(ids, None, [0, *np.cumsum(LENGTHS)], CPU)


def test_positions_restart_in_each_sequence(packed) -> None:
    _, inputs = packed
    assert inputs.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert inputs.cu_seqlens.tolist() == [0, 3, 4, 9]
    assert inputs.cu_seqlens.dtype == torch.int32
    assert (inputs.first.tolist(), inputs.last.tolist()) == ([0, 3, 4], [2, 3, 8])


FORMULAS = {
    "cls": lambda x: x[0],
    "lasttoken": lambda x: x[-1],
    "max": lambda x: x.amax(0),
    "mean": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean": lambda x: (x * torch.arange(1, len(x) + 1)[:, None]).sum(0) / sum(range(1, len(x) + 1)),
}


@pytest.mark.parametrize("mode", FORMULAS)
def test_each_mode_is_its_formula(packed, mode: str) -> None:
    hidden, inputs = packed
    wanted = torch.stack([FORMULAS[mode](part) for part in hidden.split(LENGTHS)])
    torch.testing.assert_close(TokenPooling([mode], True)(hidden, inputs), wanted)
    both = TokenPooling([mode, "mean"], True)(hidden, inputs)
    torch.testing.assert_close(both[:, :6], wanted)
    half = TokenPooling([mode], True)(hidden.half(), inputs)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), wanted, rtol=2e-3, atol=2e-3)


def test_tokens_of_a_prompt_do_not_count_where_the_folder_says_so(packed) -> None:
    """A sequence that is no longer than its prompt keeps its last token, so that its mean is a number."""
    hidden, inputs = packed
    parts = hidden.split(LENGTHS)
    wanted = torch.stack([parts[0][2:].mean(0), parts[1].mean(0), parts[2][2:].mean(0)])
    torch.testing.assert_close(TokenPooling(["mean"], False)(hidden, inputs, np.full(3, 2)), wanted)
    assert not torch.equal(TokenPooling(["mean"], True)(hidden, inputs, np.full(3, 2)), wanted)
    torch.testing.assert_close(TokenPooling(["cls"], False)(hidden, inputs, np.full(3, 2))[2], parts[2][2])


def test_modules_without_their_weights_are_refused(tmp_path) -> None:
    path = save_encoder(tmp_path, "bert", [MEAN, ("Dense", {"in_features": 32, "out_features": 4})])
    folder = read_folder(str(path), "embed")
    assert len(load_modules(folder, torch.float32, CPU)) == 2
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(OSError, match="2_Dense must hold weights"):
        load_modules(folder, torch.float32, CPU)
    save_file({"linear.weight": torch.zeros(4, 32)}, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"linear\.bias"):
        load_modules(folder, torch.float32, CPU)


def test_names_of_classes_are_looked_up_in_a_list() -> None:
    """A name in a config is never imported."""
    assert isinstance(activation_of("torch.nn.modules.activation.ReLU"), torch.nn.ReLU)
    for name in ("os.system", "torch.nn.Linear", "evil.Tanh2"):
        with pytest.raises(ParameterError, match="one of these activations: Identity"):
            activation_of(name)
    folder = EncoderFolder("x", "embed", modules=(EncoderModule("Pooling", "", {"pooling_mode": "median"}),))
    with pytest.raises(ParameterError, match="median"):
        load_modules(folder, torch.float32, CPU)


def test_modules_follow_each_other(packed) -> None:
    hidden, inputs = packed
    double = torch.nn.Linear(6, 6, bias=False)
    double.weight.data = 2 * torch.eye(6)
    found = pool([TokenPooling(["mean"], True), double], hidden, inputs)
    np.testing.assert_allclose(found.detach(), 2 * torch.stack([part.mean(0) for part in hidden.split(LENGTHS)]), rtol=1e-5)
