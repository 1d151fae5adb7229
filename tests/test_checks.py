import math

import numpy as np
import pytest
import torch

from rlhf_notes.checks import at_least_float32, check_flag, check_number, check_real, check_whole, float64_if_possible
from rlhf_notes.formulas.masking import aggregate_loss, masked_mean, masked_sum, masked_var


@pytest.mark.parametrize("value", [0, 1, 2, 0.0, None, "no", "True", [True], torch.tensor(True)])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(TypeError) as e: check_flag("name", value)
    assert str(e.value) == f"name must be True or False, got {value!r}" + ", whose .item() is Python's own" * isinstance(value, torch.Tensor)


def test_both_flags_pass():
    check_flag("name", True); check_flag("name", False)


@pytest.mark.parametrize("value", [np.float16(0.2), np.float32(3), np.longdouble(3), np.int64(3), np.uint8(3), np.bool_(True), np.array(3), torch.tensor(3)])
def test_numbers_and_flags_are_pythons_own(value):
    "NumPy would calculate in its own precision and range: 1 - np.uint8(2) is 255."
    for check in (check_number, check_whole):
        with pytest.raises(TypeError) as e: check("name", value)
        assert str(e.value) == f"name must be a number, got {type(value).__name__}, whose .item() is Python's own"
    with pytest.raises(TypeError) as e: check_flag("name", value)
    assert str(e.value) == f"name must be True or False, got {value!r}, whose .item() is Python's own"
    for several in ([3], np.ones(1), torch.ones(1)):
        with pytest.raises(TypeError, match="^name must be a number, got [A-Za-z]*$"): check_number("name", several)


def test_a_float64_of_numpys_is_a_float():
    check_number("name", np.float64(0.2), 0, 1)
    with pytest.raises(TypeError, match="^name must be an integer, got 3.0$"): check_whole("name", np.float64(3))
    with pytest.raises(ValueError, match=r"^name must be in \[0, 1\], got 1.5$"): check_number("name", np.float64(1.5), 0, 1)


@pytest.mark.parametrize("value, error, message", [
    (2.5, TypeError, "name must be an integer, got 2.5"), (2.0, TypeError, "name must be an integer, got 2.0"), (math.inf, TypeError, "name must be an integer, got inf"),
    (True, TypeError, "name must be a number, got bool"), ("3", TypeError, "name must be a number, got str"), (None, TypeError, "name must be a number, got NoneType"),
    (0, ValueError, "name must be in [1, 9], got 0"), (10, ValueError, "name must be in [1, 9], got 10")])
def test_a_whole_number_is_an_integer_in_its_range(value, error, message):
    with pytest.raises(error) as e: check_whole("name", value, 1, 9)
    assert str(e.value) == message


def test_whole_numbers_pass():
    for n in (1, 5, 9): check_whole("name", n, 1, 9)
    check_whole("name", -10**12)
    for n in (10**400, -10**400):                                                     # of which there is no float
        with pytest.raises(ValueError, match=rf"^name must be in \(-inf, inf\), got {n}$"): check_whole("name", n)
        with pytest.raises(ValueError, match=rf"^name must be in \[1, 9\], got {n}$"): check_whole("name", n, 1, 9)
    with pytest.raises(ValueError, match=r"name must be in \(0, inf\), got 0"): check_whole("name", 0, low=0, open_low=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("f, name", [
    (masked_sum, "x"), (masked_mean, "x"), (masked_var, "x"), (at_least_float32, "x"), (float64_if_possible, "x"), (lambda x: masked_mean(x, dim=1), "x"), (lambda x: check_real(what=x), "what"),
    (lambda x: masked_mean(x, torch.ones(2, 3, dtype=torch.bool)), "x"), (aggregate_loss, "loss")])
def test_complex_numbers_do_not_lose_half_of_themselves(f, name, dtype):
    with pytest.raises(TypeError) as e: f(torch.zeros(2, 3, dtype=dtype))
    assert str(e.value) == f"{name} must be real, got {dtype}"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_that_is_real_passes(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    check_real(x=x)
    assert masked_mean(x) == aggregate_loss(x) == 1 and masked_var(x) == 0
