import pytest
import torch

from rankone.errors import BackendUnavailableError
from rankone.icl.gradients import IMPLEMENTATIONS, api, choose, loss_and_grad

CPU = torch.device("cpu")


def arguments(*, dim=3, members=2, kind="full"):
    p = torch.zeros(members, 1, 1, dim + 1, dim + 1) if kind == "full" else torch.zeros(2, 1, 1, 2)
    gram = torch.eye(dim + 1).expand(1, 5, dim + 1, dim + 1)
    stream = torch.zeros(members, dtype=torch.long)
    return {
        "kind": kind,
        "p": p,
        "q": p.clone(),
        "gram": gram,
        "weights": torch.ones(1, 5, dim),
        "stream": stream,
        "impl": "reference",
    }


def test_auto_takes_the_fused_kernel_of_the_device_and_says_why():
    assert choose("auto", CPU, 10) == (
        "fused_cpu",
        "numba is installed and the tensors are on cpu",
    )
    assert choose("reference", CPU, 10)[0] == "reference"


def test_auto_falls_back_where_no_kernel_fits_and_a_named_one_does_not():
    name, why = choose("auto", CPU, 32)
    assert name == "reference"
    assert "at most 31 features, got 32" in why
    with pytest.raises(BackendUnavailableError, match="at most 31 features, got 32"):
        choose("fused_cpu", CPU, 32)
    assert choose("auto", torch.device("meta"), 3)[0] == "reference"


def test_a_kernel_of_another_device_is_not_available():
    with pytest.raises(BackendUnavailableError, match="fused_gpu needs tensors on a CUDA device"):
        choose("fused_gpu", CPU, 10)
    with pytest.raises(BackendUnavailableError, match="fused_cpu needs tensors on the CPU"):
        choose("fused_cpu", torch.device("cuda"), 10)
    with pytest.raises(BackendUnavailableError, match="fused_gpu needs"):
        loss_and_grad(**arguments() | {"impl": "fused_gpu"})


def test_a_kernel_without_its_package_is_not_available(monkeypatch):
    monkeypatch.setattr(api, "find_spec", lambda name: None)
    assert choose("auto", CPU, 10) == (
        "reference",
        "fused_cpu needs numba, which is not installed",
    )
    with pytest.raises(BackendUnavailableError, match="needs numba, which is not installed"):
        choose("fused_cpu", CPU, 10)


def test_an_unknown_implementation_is_told_the_known_ones():
    with pytest.raises(ValueError, match=f"one of {', '.join(IMPLEMENTATIONS)}, got 'fast'"):
        choose("fast", CPU, 10)


def test_zero_models_have_the_loss_of_predicting_zero():
    result = loss_and_grad(**arguments())
    assert result.loss.tolist() == [1.5, 1.5]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "fuller"}, r"one of full, diag, gd\+\+, got 'fuller'"),
        ({"p": torch.zeros(2, 1, 1, 3, 3)}, r"p of full models must have shape \(2, 1, 1, 4, 4\)"),
        ({"q": torch.zeros(2, 2, 1, 4, 4)}, r"q of full models must have shape \(2, 1, 1, 4, 4\)"),
        ({"kind": "diag"}, r"p of diag models must have shape \(2, 1, 1, 2\)"),
        ({"gram": torch.zeros(1, 4, 4, 4)}, r"gram must have shape .* \(1, 5, 4, 4\), got \(1, 4"),
        ({"weights": torch.ones(1, 5, 2)}, r"must have shape"),
        ({"stream": torch.zeros(3, dtype=torch.long)}, r"stream must have shape \[R\] = \(2,\)"),
        ({"stream": torch.tensor([0, 7])}, r"stream must be from 0 to 0, got \[0, 7\]"),
        ({"importance": torch.ones(1, 4)}, r"importance must have shape \[S, B\] = \(1, 5\)"),
        ({"limit": 0.0}, "limit must be positive, got 0.0"),
        ({"limit": torch.ones(3)}, r"limit must be a number or have shape \[R\] = \(2,\)"),
        ({"limit": float("nan")}, "limit must be positive, got nan"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        loss_and_grad(**arguments() | change)


@pytest.mark.usefixtures("unchecked")
def test_gdpp_has_one_q():
    p = torch.zeros(2, 1, 1, 2)
    with pytest.raises(ValueError, match=r"q of gd\+\+ models must have shape \(2, 1, 1, 1\)"):
        loss_and_grad(**arguments() | {"kind": "gd++", "p": p, "q": p})
