"""Pooling, dense layers, layer norms: the numbers of sentence-transformers, and plain formulas where it is not installed."""

import json

import numpy as np
import pytest
import torch
from encoder_folders import TEXTS, save_encoder
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

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


class Operations(TorchDispatchMode):
    """The names of the operators of PyTorch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


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


def test_tokens_are_left_out_without_asking_the_device(packed) -> None:
    """Tensors without memory take the place of a GPU. Code that asks a GPU for numbers waits for its kernels; here it fails."""
    hidden, inputs = packed
    there = inputs._replace(positions=inputs.positions.to("meta"), cu_seqlens=inputs.cu_seqlens.to("meta"))
    found = TokenPooling(["cls", "lasttoken"], False)(hidden.to("meta"), there, np.full(3, 2))
    assert found.shape == (3, 12)


@pytest.mark.parametrize(("mode", "launches"), [("cls", ["_to_copy", "index"]), ("lasttoken", ["_to_copy", "sub", "index"])])
def test_a_mode_that_reads_one_token_of_each_sequence_counts_none(packed, mode: str, launches: list[str]) -> None:
    hidden, inputs = packed
    with Operations() as seen:
        TokenPooling([mode], True)(hidden, inputs)
    assert [name for name in seen.names if name not in ("slice", "view")] == launches


def test_modules_without_their_weights_are_refused(tmp_path) -> None:
    path = save_encoder(tmp_path, "bert", [MEAN, ("Dense", {"in_features": 32, "out_features": 4})])
    folder = read_folder(str(path), "embed")
    assert len(load_modules(folder, torch.float32, CPU)) == 2
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(OSError, match="2_Dense must hold weights"):
        load_modules(folder, torch.float32, CPU)
    save_file({"linear.weight": torch.zeros(4, 32)}, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(ParameterError, match=r"linear\.bias"):
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


DENSE = [MEAN, ("Dense", {"in_features": 32, "out_features": 20}), ("LayerNorm", {"dimension": 20})]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool])
def test_weights_of_a_module_that_need_scales_are_refused(tmp_path, dtype: torch.dtype) -> None:
    file = save_encoder(tmp_path, "bert", DENSE) / "2_Dense" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"linear.weight": weights["linear.weight"].to(dtype)}, file)
    with pytest.raises(ParameterError, match=f"bits in 2_Dense, but linear.weight has the dtype {str(dtype)[6:]}"):
        Encoder(EngineConfig(model=tmp_path, device="cpu", dtype="float32"))


@pytest.mark.parametrize("name", ["linear.weight", "linear.bias", "other"])
def test_weights_of_a_module_that_do_not_fit_are_refused(tmp_path, name: str) -> None:
    file = save_encoder(tmp_path, "bert", DENSE) / "2_Dense" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {name: torch.zeros(3)}, file)
    with pytest.raises(
        ParameterError, match=r"weights in 2_Dense that fit the module's config, which asks for .*; the file has"
    ):
        Encoder(EngineConfig(model=tmp_path, device="cpu", dtype="float32"))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_a_module_that_cannot_be_read_are_refused(tmp_path, name: str) -> None:
    folder = save_encoder(tmp_path, "bert", DENSE) / "2_Dense"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"junk")
    with pytest.raises(OSError, match=rf"file .*2_Dense/{name} cannot be read: "):
        Encoder(EngineConfig(model=tmp_path, device="cpu", dtype="float32"))


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        ("1_Pooling", {"pooling_mode": 3}, "pooling_mode: .*, got 3"),
        ("1_Pooling", {"pooling_mode": []}, r"pooling_mode: .*, got \[\]"),
        ("1_Pooling", {"pooling_mode": ["cls", "mean"]}, "Dense for vectors of 64 numbers, but it takes 32"),
        ("2_Dense", {"in_features": "32"}, "a positive integer as in_features .*, got '32'"),
        ("2_Dense", {"activation_function": None}, "one of these activations: .*, got None"),
        ("3_LayerNorm", {"dimension": None}, "a positive integer as dimension .*, got None"),
    ],
)
def test_settings_of_a_module_that_cannot_be_used_are_refused(tmp_path, place: str, changes: dict, message: str) -> None:
    file = save_encoder(tmp_path, "bert", DENSE) / place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ParameterError, match=message):
        Encoder(EngineConfig(model=tmp_path, device="cpu", dtype="float32"))


@pytest.mark.parametrize("place", ["1_Pooling", "2_Dense", "3_LayerNorm"])
def test_a_module_without_its_config_is_refused(tmp_path, place: str) -> None:
    """A Pooling would have averaged the tokens, although the folder's mode may be another one."""
    dense = ("Dense", {"in_features": 32, "out_features": 20})
    path = save_encoder(tmp_path, "bert", [("Pooling", {"pooling_mode": "cls"}), dense, ("LayerNorm", {"dimension": 20})])
    (path / place / "config.json").unlink()
    with pytest.raises(OSError, match=rf"{place} must hold a config\.json with settings, got none: copy all files"):
        load_modules(read_folder(str(path), "embed"), torch.float32, CPU)
