"""The capability of a GPU in the spellings that people use; what is no GPU is refused with the nearest name."""

import pytest

from fa_serve.gpu_names import CAPABILITIES, find_arch

SPELLINGS = {
    90: (
        "9.0",
        "90",
        "9",
        "sm90",
        "sm_90",
        "sm_90a",
        "compute_90",
        "H100",
        "h200",
        "hopper",
        "NVIDIA H100 80GB HBM3",
        "h100-sxm5-80gb",
    ),
    80: ("8.0", "80", "A100", "ampere", "A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB"),
    86: ("8.6", "3080", "RTX 3090 Ti", "A10G"),
    89: ("89", "RTX4090", "4090", "NVIDIA GeForce RTX 4070 Ti SUPER", "4070ti", "L40S", "ada", "Ada Lovelace"),
    100: ("10.0", "100", "10", "sm_100", "sm_100a", "B200", "blackwell"),
    120: ("12", "12.0", "RTX 5090"),
    0: ("gfx942", "MI300", "MI300X", "AMD Instinct MI325X"),
}


@pytest.mark.parametrize(("name", "arch"), [(name, arch) for arch, names in SPELLINGS.items() for name in names])
def test_a_spelling_is_understood(name, arch):
    assert find_arch(name) == arch


@pytest.mark.parametrize("name", ["0.9", "1.2", "91", "9.00", "0", "09", "6.1"])
def test_a_number_that_no_gpu_has_is_refused(name):
    with pytest.raises(ValueError, match="--arch must be") as caught:
        find_arch(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("hoper", "did you mean hopper"), ("mi100", "did you mean mi300"), ("tpu", "give its compute"), ("", "give its compute")],
)
def test_a_name_that_is_none_is_refused_with_the_remedy(name, remedy):
    with pytest.raises(ValueError, match=remedy):
        find_arch(name)


def test_every_capability_is_itself():
    assert [find_arch(str(arch / 10)) for arch in CAPABILITIES] == list(CAPABILITIES)
