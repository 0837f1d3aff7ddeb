"""The chunked output layer against log_softmax in one piece, in value and in gradient."""

import pytest
import torch

from asyncrl.trainer.token_logprobs import LogitRules, token_logprobs

N, D, V = 37, 16, 51


def draw(dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    offset = torch.randn(V, generator=g).to(dtype).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(0, V, (N,), generator=g), torch.randn(N, generator=g)


def reference(hidden, weight, bias, targets, temperature, cap=0.0):
    logits = torch.nn.functional.linear(hidden, weight, bias).double()
    logits = (cap * (logits / cap).tanh() if cap else logits) / temperature
    logp = logits.log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk_rows", [1, 5, N, 10 * N])
@pytest.mark.parametrize(("of_logprob", "of_entropy"), [(1, 0), (0, 1), (1, -0.5)])
@pytest.mark.parametrize(("temperature", "bias", "cap"), [(1.0, True, 0.0), (0.7, False, 0.0), (0.7, True, 3.0)])
def test_value_entropy_and_gradient(chunk_rows, of_logprob, of_entropy, temperature, bias, cap):
    found, expected = draw(bias=bias), [None if x is None else x.detach().double() for x in draw(bias=bias)]
    for x in expected[:3]:
        if x is not None:
            x.requires_grad_()
    targets, upstream = found[3], found[4]
    rules = LogitRules(chunk_rows * V, cap=cap)
    logprobs, entropy = token_logprobs(*found[:3], targets, temperature=temperature, rules=rules)
    wanted, wanted_entropy = reference(*expected[:3], targets, temperature, cap)
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-5, rtol=1e-6)
    ((of_logprob * logprobs + of_entropy * entropy) * upstream).sum().backward()
    ((of_logprob * wanted + of_entropy * wanted_entropy) * upstream.double()).sum().backward()
    for a, b in zip(found[:3], expected[:3], strict=True):
        if a is not None:
            torch.testing.assert_close(a.grad.double(), b.grad, atol=2e-5, rtol=1e-5)


def test_bfloat16_sums_gradients_in_float32():
    whole, chunked = draw(torch.bfloat16), draw(torch.bfloat16)
    for inputs, rows in ((whole, N), (chunked, 1)):
        logprobs, _ = token_logprobs(*inputs[:4], temperature=1.0, rules=LogitRules(rows * V))
        assert logprobs.dtype == torch.float32
        (logprobs * inputs[4]).sum().backward()
    torch.testing.assert_close(whole[1].grad, chunked[1].grad, atol=0.02, rtol=0.01)


def test_logits_far_from_zero_stay_finite():
    hidden, weight, bias, targets, _ = draw()
    logprobs, entropy = token_logprobs(hidden * 1e3, weight, bias, targets, temperature=1.0)
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()


def test_peak_memory_does_not_grow_with_the_tokens():
    """The largest tensor that is ever allocated is a chunk, not [tokens, vocabulary]."""
    hidden, weight, bias, targets, upstream = draw()
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        logprobs, _ = token_logprobs(hidden, weight, bias, targets, temperature=1.0, rules=LogitRules(2 * V))
        logprobs.backward(upstream)
    assert max(sizes) == max(N * D, V * D, 2 * V) < N * V


def exact_values(inputs, temperature):
    """Of the 16-bit numbers as they are, in float64, with gradients."""
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in inputs[:3]]
    logprobs, entropy = reference(*leaves, inputs[3], temperature)
    (logprobs * inputs[4].double()).sum().backward()
    return logprobs.detach(), entropy.detach(), leaves


@pytest.mark.parametrize("bias", [True, False])
def test_logits_in_float32_are_not_rounded_to_the_dtype_of_the_passes(bias):
    """The error of a log-probability falls from that of bfloat16 to that of float32; gradients are as before."""
    errors = {}
    for in_float32 in (False, True):
        found = draw(torch.bfloat16, bias=bias)
        wanted, wanted_entropy, leaves = exact_values(found, 0.7)
        rules = LogitRules(5 * V, in_float32=in_float32)
        logprobs, entropy = token_logprobs(*found[:3], found[3], temperature=0.7, rules=rules)
        errors[in_float32] = float((logprobs - wanted).abs().max()), float((entropy - wanted_entropy).abs().max())
        (logprobs * found[4]).sum().backward()
        for a, b in zip(found[:3], leaves, strict=True):
            if a is not None:
                torch.testing.assert_close(a.grad.double(), b.grad, atol=0.03 * float(b.grad.abs().max()), rtol=0.03)
    assert errors[False][0] > 5e-3, "what rounding costs"
    assert max(errors[True]) < 2e-5


def test_a_gpu_keeps_the_sums_of_16_bit_products_in_float32():
    """The operator that it uses gives float32; torch has it for CUDA and, without values, here."""
    hidden, weight = (torch.empty(rows, D, dtype=torch.bfloat16, device="meta") for rows in (N, V))
    assert torch.mm(hidden, weight.T, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.gpu
def test_logits_in_float32_on_a_gpu_are_those_of_a_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    rules = LogitRules(in_float32=True)
    here = draw(torch.bfloat16)
    there = [x.detach().cuda() for x in here[:4]]
    wanted, _ = token_logprobs(*here[:4], temperature=1.0, rules=rules)
    found, _ = token_logprobs(*there, temperature=1.0, rules=rules)
    torch.testing.assert_close(found.cpu(), wanted.detach(), atol=1e-4, rtol=1e-5)
