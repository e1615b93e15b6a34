"""``cute_attn.attention`` on CPU tensors: every option, and the message of every wrong argument."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn import reference
from cute_attn.call import Sizes
from cute_attn.memory import MAX_BLOCKS, check_limits
from cute_attn.options import MAX_LENGTH

Arguments = dict[str, Any]


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def dense(dtype: torch.dtype = torch.float16) -> Arguments:
    """2 sequences of 5 queries and 7 keys; 4 query heads share 2 key heads."""
    return {
        "q": normal(2, 4, 5, 16, dtype=dtype),
        "k": normal(2, 2, 7, 16, dtype=dtype),
        "v": normal(2, 2, 7, 24, dtype=dtype),
    }


def cumulative(*lengths: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed() -> Arguments:
    """3 sequences, one of them without queries."""
    return {
        "q": normal(9, 4, 16),
        "k": normal(11, 2, 16),
        "v": normal(11, 2, 24),
        "cu_seqlens_q": cumulative(4, 0, 5),
        "cu_seqlens_k": cumulative(1, 3, 7),
    }


def swapped(arguments: Arguments) -> Arguments:
    """The same in layout "bshd"."""
    return {name: x.transpose(1, 2).contiguous() for name, x in arguments.items()} | {"layout": "bshd"}


OPTIONS: dict[str, Arguments] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "causal window": {"causal": True, "window": (2, 5)},
    "left": {"window": (3, None)},
    "right": {"window": [-1, 0]},
    "scale": {"scale": 0.3},
    "int scale": {"scale": 2},
    "no scale": {"scale": 0.0},
    "negative scale": {"scale": -0.4},
    "config": {"config": cute_attn.PrefillConfig()},
    "seed config": {"config": "seed_64x64_1stage"},
    "lengths": {"max_seqlen_q": 5, "max_seqlen_k": 7},
}
INPUTS: dict[str, Callable[[], Arguments]] = {
    "bhsd": dense,
    "bshd": lambda: swapped(dense()),
    "bf16": lambda: dense(torch.bfloat16),
    "packed": packed,
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_mean_what_the_reference_says(inputs: str, options: str) -> None:
    arguments = INPUTS[inputs]() | OPTIONS[options]
    out, lse = cute_attn.attention(**arguments, return_lse=True)
    exact, exact_lse = reference.attention(
        **{name: value for name, value in arguments.items() if name != "config"}, return_lse=True
    )
    torch.testing.assert_close((out, lse), (exact, exact_lse), rtol=0, atol=0)
    assert out.dtype == arguments["q"].dtype
    assert out.is_contiguous()
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert torch.equal(cute_attn.attention(**arguments), out)
    into = torch.full_like(out, math.nan)
    assert cute_attn.attention(**arguments, out=into) is into
    assert torch.equal(into, out)
    into.fill_(math.nan)
    same, same_lse = cute_attn.attention(**arguments, out=into, return_lse=True)
    assert same is into
    assert torch.equal(into, out)
    assert torch.equal(same_lse, lse)


def test_views_are_taken_without_a_copy() -> None:
    qkv = normal(2, 9, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    expected = cute_attn.attention(*(x.contiguous() for x in (q, k, v)), layout="bshd")
    assert torch.equal(cute_attn.attention(q, k, v, layout="bshd"), expected)
    transposed = cute_attn.attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(transposed.transpose(1, 2), expected)
    one_head = k[:, :, :1].expand(-1, -1, 4, -1)
    assert torch.equal(
        cute_attn.attention(q, one_head, one_head, layout="bshd"),
        cute_attn.attention(q, one_head.contiguous(), one_head.contiguous(), layout="bshd"),
    )


def test_dimensions_of_size_one_may_have_any_stride() -> None:
    x = normal(1, 1, 5, 16)
    odd = x.as_strided(x.shape, (3, 7, 16, 1))
    assert torch.equal(cute_attn.attention(odd, odd, odd, out=odd.clone().as_strided(x.shape, (1, 5, 16, 1))),
                       cute_attn.attention(x, x, x))  # fmt: skip


def test_out_may_lie_between_the_inputs() -> None:
    """A packed buffer with room for the result: memory regions interleave, elements do not."""
    buffer = normal(2, 9, 4, 2, 16)
    q, k, v, out = buffer.unbind(2)
    expected = cute_attn.attention(q, k, v, layout="bshd")
    cute_attn.attention(q, k, v, layout="bshd", out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("shape", "k_len"), [((0, 4, 5, 16), 7), ((2, 0, 5, 16), 7), ((2, 4, 0, 16), 7), ((2, 4, 5, 16), 0)]
)
def test_empty(shape: tuple[int, ...], k_len: int) -> None:
    k = normal(shape[0], 2, k_len, 16)
    out, lse = cute_attn.attention(normal(*shape), k, k, causal=True, return_lse=True)
    assert out.shape == shape
    assert (out == 0).all()
    assert lse.shape == shape[:3]
    assert (lse == -math.inf).all()


def test_no_packed_sequences() -> None:
    x, none = normal(0, 2, 16), torch.zeros(1, dtype=torch.int32)
    out, lse = cute_attn.attention(x, x, x, cu_seqlens_q=none, cu_seqlens_k=none, return_lse=True)
    assert out.shape == (0, 2, 16)
    assert lse.shape == (2, 0)


def test_rows_of_no_packed_sequence_stay_as_they_are() -> None:
    x, bounds = normal(9, 2, 16), cumulative(2, 3)
    out = torch.full_like(x, math.nan)
    cute_attn.attention(x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds, out=out)
    assert out[:5].isfinite().all()
    assert out[5:].isnan().all()


def test_autocast_casts_the_inputs() -> None:
    arguments = dense(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = cute_attn.attention(**arguments, return_lse=True)
    expected = cute_attn.attention(**{name: x.bfloat16() for name, x in arguments.items()}, return_lse=True)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64, torch.float8_e4m3fn])
def test_autocast_leaves_other_dtypes(dtype: torch.dtype) -> None:
    arguments = {name: x.to(dtype) for name, x in dense().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=f"q: dtype is {dtype}; allowed"):
        cute_attn.attention(**arguments)


@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_meta_and_cpu_tensors_do_not_mix(argument: str) -> None:
    arguments = dense()
    arguments[argument] = arguments[argument].to("meta")
    with pytest.raises(ValueError, match=r"device is (meta|cpu); allowed: (meta|cpu), that of q"):
        cute_attn.attention(**arguments)


def test_deterministic_mode() -> None:
    expected = cute_attn.attention(**dense())
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(cute_attn.attention(**dense()), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_gradient_is_refused_and_never_pretended() -> None:
    arguments = dense()
    arguments["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"v: requires_grad is True; allowed: False.*no backward.*no_grad"):
        cute_attn.attention(**arguments)
    with torch.no_grad():
        assert not cute_attn.attention(**arguments).requires_grad
    with torch.inference_mode():
        assert not cute_attn.attention(**arguments).requires_grad


def misaligned(x: Tensor, shift: int = 1) -> Tensor:
    """The same values, ``shift`` elements after a 16-byte boundary."""
    return torch.cat([x.new_zeros(shift), x.flatten()])[shift:].reshape(x.shape)


def with_row_stride(x: Tensor, extra: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, extra))[..., : x.shape[-1]]


def change(inputs: Callable[[], Arguments], **changes: Any) -> Arguments:
    """Inputs with some arguments replaced, or passed through a function."""
    arguments = inputs()
    for name, value in changes.items():
        arguments[name] = value(arguments.get(name)) if callable(value) else value
    return arguments


Wrong = tuple[Arguments, str]
WRONG: dict[str, Wrong] = {
    # Types and devices.
    "q no tensor": (change(dense, q=[1.0]), "q: its type is list; allowed: torch.Tensor"),
    "v no tensor": (change(dense, v=None), "v: its type is NoneType; allowed: torch.Tensor"),
    "out no tensor": (change(dense, out=3), "out: its type is int; allowed: None, or torch.Tensor"),
    "fp32": (change(dense, q=Tensor.float, k=Tensor.float, v=Tensor.float),
             "q: dtype is torch.float32; allowed: torch.float16, torch.bfloat16 (cute_attn.reference takes others)"),
    "fp8": ({name: x.to(torch.float8_e4m3fn) for name, x in dense().items()}, "q: dtype is torch.float8_e4m3fn"),
    "dtype of k": (change(dense, k=Tensor.bfloat16), "k: dtype is torch.bfloat16; allowed: torch.float16, that of q"),
    "dtype of v": (change(dense, v=Tensor.float), "v: dtype is torch.float32; allowed: torch.float16, that of q"),
    # Shapes.
    "q of 3": (change(dense, q=lambda x: x[0]),
               "q: shape is (4, 5, 16); allowed: 4 dimensions, (batch, heads, length, head_dim)"),
    "v of 5": (change(dense, v=lambda x: x[None]), "v: shape is (1, 2, 2, 7, 24); allowed: 4 dimensions"),
    "bshd of 3": (change(dense, k=lambda x: x[0], layout="bshd"), "4 dimensions, (batch, length, heads, head_dim)"),
    "packed of 4": (change(packed, q=lambda x: x[None]),
                    "q: shape is (1, 9, 4, 16); allowed: 3 dimensions, (total, heads, head_dim) with cu_seqlens"),
    "batch of k": (change(dense, k=lambda x: x[:1]), "k: batch is 1; allowed: 2, that of q"),
    "batch of v": (change(dense, v=lambda x: x[:1]), "v: batch is 1; allowed: 2, that of q"),
    "ratio": (change(dense, q=lambda x: x[:, :3]), "k: its number of heads is 2; allowed: a divisor of q's 3"),
    "no kv heads": (change(dense, k=lambda x: x[:, :0], v=lambda x: x[:, :0]), "k: its number of heads is 0"),
    "heads of v": (change(dense, v=lambda x: x[:, :1]), "v: its number of heads is 1; allowed: 2, that of k"),
    "length of v": (change(dense, v=lambda x: x[:, :, :6]), "v: length is 6; allowed: 7, that of k"),
    "packed length of v": (change(packed, v=lambda x: x[:6]), "v: length is 6; allowed: 11, that of k"),
    "head_dim of k": (change(dense, k=lambda x: x[..., :8]), "k: head_dim is 8; allowed: 16, that of q"),
    "head_dim 12": (change(dense, q=lambda x: x[..., :12], k=lambda x: x[..., :12]),
                    "q: head_dim is 12; allowed: a multiple of 8 from 8 to 256"),
    "head_dim 0": (change(dense, q=lambda x: x[..., :0], k=lambda x: x[..., :0]), "q: head_dim is 0; allowed: a mul"),
    "head_dim_v 20": (change(dense, v=lambda x: x[..., :20]), "v: head_dim is 20; allowed: a multiple of 8"),
    "head_dim_v 264": (change(dense, v=lambda x: normal(2, 2, 7, 264)), "v: head_dim is 264; allowed: a multiple of 8"),
    # Memory.
    "last dimension": (change(dense, q=lambda x: x.mT.contiguous().mT),
                       "q: stride is (320, 80, 1, 5); allowed: 1 in the last dimension (call .contiguous())"),
    "expanded values": (change(dense, v=lambda x: x[..., :1].expand(-1, -1, -1, 8)), "v: stride is (336, 168, 24, 0)"),
    "row stride": (change(dense, k=lambda x: with_row_stride(x, 4)),
                   "k: stride is (280, 140, 20, 1); allowed: multiples of 8 elements before the last dimension"),
    "address": (change(dense, v=misaligned), "v: address of its first element is 0x"),
    # Cumulative lengths.
    "only q": (change(packed, cu_seqlens_k=None), "cu_seqlens_k: it is None; allowed: a tensor, as the other"),
    "only k": (change(packed, cu_seqlens_q=None), "cu_seqlens_q: it is None; allowed: a tensor, as the other"),
    "list": (change(packed, cu_seqlens_q=[0, 4, 4, 9]), "cu_seqlens_q: its type is list; allowed: None, or torch.Te"),
    "int64": (change(packed, cu_seqlens_q=Tensor.long), "cu_seqlens_q: dtype is torch.int64; allowed: torch.int32"),
    "float": (change(packed, cu_seqlens_k=Tensor.float), "cu_seqlens_k: dtype is torch.float32; allowed: torch.int32"),
    "2 dimensions": (change(packed, cu_seqlens_k=lambda x: x[None]), "cu_seqlens_k: shape is (1, 4); allowed: (batch"),
    "no bounds": (change(packed, cu_seqlens_q=lambda x: x[:0]), "cu_seqlens_q: shape is (0,); allowed: (batch + 1,)"),
    "lengths": (change(packed, cu_seqlens_k=lambda x: x[:3]), "cu_seqlens_k: length is 3; allowed: 4, that of cu_seql"),
    "not dense": (change(packed, cu_seqlens_k=lambda x: torch.stack([x, x], 1)[:, 0]),
                  "cu_seqlens_k: stride is 2; allowed: 1 (call .contiguous())"),
    "beyond": (change(packed, cu_seqlens_q=lambda x: x + 1), "cu_seqlens_q: it is [1, 5, 5, 10]; allowed: lengths sum"),
    "max_seqlen_q": (change(packed, max_seqlen_q=5.0), "max_seqlen_q: it is 5.0; allowed: None, or an int from 0"),
    "max_seqlen_k": (change(packed, max_seqlen_k=-1), "max_seqlen_k: it is -1; allowed: None, or an int from 0"),
    # Options.
    "causal": (change(dense, causal="yes"), "causal: it is 'yes'; allowed: True or False"),
    "return_lse": (change(dense, return_lse=1), "return_lse: it is 1; allowed: True or False"),
    "window int": (change(dense, window=4), "window: it is 4; allowed: None or (left, right)"),
    "window of 3": (change(dense, window=(1, 2, 3)), "window: it is (1, 2, 3); allowed: None or (left, right)"),
    "window float": (change(dense, window=(1.0, 0)), "window: its left width is 1.0; allowed: None or -1 (unbounded)"),
    "window -2": (change(dense, window=(0, -2)), "window: its right width is -2; allowed: None or -1 (unbounded), or"),
    "window bool": (change(dense, window=(True, 0)), "window: its left width is True; allowed: None or -1"),
    "causal and window": (change(dense, causal=True, window=(0, -2)), "window: its right width is -2"),
    "scale nan": (change(dense, scale=math.nan), "scale: it is nan; allowed: None, or a finite float"),
    "scale inf": (change(dense, scale=-math.inf), "scale: it is -inf; allowed: None, or a finite float"),
    "scale 1e39": (change(dense, scale=1e39), "scale: it is 1e+39; allowed: None, or a finite float, at most 1e38"),
    "scale tensor": (change(dense, scale=lambda _: torch.tensor(1.0)), "scale: its type is Tensor; allowed: None, or"),
    "scale bool": (change(dense, scale=True), "scale: its type is bool; allowed: None, or a finite float"),
    "layout": (change(dense, layout="sbhd"), "layout: it is 'sbhd'; allowed: 'bhsd' or 'bshd'"),
    "layout None": (change(packed, layout=None), "layout: it is None; allowed: 'bhsd' or 'bshd'"),
    "config name": (change(dense, config="fast"), "config: it is 'fast'; allowed: seed_64x64_1stage, "),
    "config type": (change(dense, config=3), "config: its type is int; allowed: None, a PrefillConfig, or a config's"),
    # Out.
    "out shape": (change(dense, out=lambda _: normal(2, 4, 5, 16)), "out: shape is (2, 4, 5, 16); allowed: (2, 4, 5, "),
    "out packed": (change(packed, out=lambda _: normal(4, 9, 24)), "out: shape is (4, 9, 24); allowed: (9, 4, 24)"),
    "out dtype": (change(dense, out=lambda _: normal(2, 4, 5, 24).float()), "out: dtype is torch.float32; allowed: to"),
    "out last": (change(dense, out=lambda _: normal(2, 4, 24, 5).mT), "out: stride is (480, 120, 1, 5); allowed: 1 in"),
    "out rows": (change(dense, out=lambda _: with_row_stride(normal(2, 4, 5, 24), 4)), "out: stride is (560, 140, 28"),
    "out address": (change(dense, out=lambda _: misaligned(normal(2, 4, 5, 24))), "out: address of its first element"),
    "out expanded": (change(dense, out=lambda _: normal(2, 1, 5, 24).expand(-1, 4, -1, -1)),
                     "out: stride is (120, 0, 24, 1); allowed: strides that give each element its own memory"),
    "out gradient": (change(dense, out=lambda _: normal(2, 4, 5, 24).requires_grad_()), "out: requires_grad is True"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        cute_attn.attention(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("shared", ["q", "k", "v"])
def test_out_must_not_share_memory_with_an_input(shared: str) -> None:
    arguments: Arguments = {name: normal(2, 4, 5, 16) for name in "qkv"}
    with pytest.raises(
        ValueError, match=f"out: its memory is shared with {shared}; allowed: memory that no input uses"
    ):
        cute_attn.attention(**arguments, out=arguments[shared])
    buffer = normal(2 * 4 * 5 * 16 + 8)
    arguments[shared] = buffer[:-8].view(2, 4, 5, 16)
    with pytest.raises(ValueError, match=f"shared with {shared}"):
        cute_attn.attention(**arguments, out=buffer[8:].view(2, 4, 5, 16))


def test_out_that_is_hard_to_tell_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_hard(*_: object, **__: object) -> bool:
        raise numpy.exceptions.TooHardError

    monkeypatch.setattr(numpy, "shares_memory", too_hard)
    q, k, v, out = normal(2, 9, 4, 2, 16).unbind(2)
    with pytest.raises(ValueError, match="shared with q"):
        cute_attn.attention(q, k, v, layout="bshd", out=out)


def test_limits() -> None:
    def sizes(**changes: int) -> Sizes:
        return Sizes(**(dict.fromkeys(Sizes._fields, 1) | changes))

    for allowed in ({"q_len": MAX_LENGTH}, {"k_len": MAX_LENGTH}, {"batch": MAX_BLOCKS}, {"heads": MAX_BLOCKS}):
        check_limits(sizes(**allowed), packed=False)
        check_limits(sizes(**allowed), packed=True)
    for argument, wrong in {"q": {"q_len": MAX_LENGTH + 1}, "k": {"k_len": MAX_LENGTH + 1}}.items():
        with pytest.raises(ValueError, match=f"{argument}: length is {MAX_LENGTH + 1}; allowed: at most {MAX_LENGTH}"):
            check_limits(sizes(**wrong), packed=False)
    for wrong in ({"batch": MAX_BLOCKS + 1}, {"heads": 2**17, "q_len": 2**20}):
        with pytest.raises(ValueError, match=f"q: number of blocks .* allowed: at most {MAX_BLOCKS}"):
            check_limits(sizes(**wrong), packed=False)
    check_limits(sizes(heads=2, q_len=64, batch=MAX_BLOCKS // 2 - 1), packed=True)
    with pytest.raises(ValueError, match="number of blocks"):
        check_limits(sizes(heads=2, q_len=64, batch=MAX_BLOCKS // 2), packed=True)


def test_long_expanded_inputs_are_refused_before_any_work() -> None:
    row = normal(1, 1, 1, 8)
    long = row.expand(1, 1, MAX_LENGTH + 1, 8)
    with pytest.raises(ValueError, match=r"k: length is .*; allowed: at most"):
        cute_attn.attention(row, long, long)


def test_warmup_without_a_gpu_has_nothing_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert cute_attn.warmup(head_dim=64) == []


@pytest.mark.parametrize("wrong", [None, "64", 64.0, True])
def test_warmups_take_ints(wrong: Any) -> None:
    for warmup in (cute_attn.warmup, cute_attn.warmup_decode):
        with pytest.raises(ValueError, match=r"head_dim: it is .*; allowed: an int, or several"):
            warmup(wrong)


def test_warmups_take_one_dtype_or_several() -> None:
    cute_attn.warmup(64, dtypes=torch.float16)
    cute_attn.warmup_decode(64, dtypes=torch.float16, cache_dtypes=torch.int8)
    with pytest.raises(ValueError, match="dtypes: one of them"):
        cute_attn.warmup(64, dtypes=torch.float32)


STRANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda x: x.float().to_sparse(),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_only_plain_tensors_are_taken(kind: str) -> None:
    q, k, v = (torch.zeros(1, 2, 5, 64, dtype=torch.float16) for _ in range(3))
    with pytest.raises(ValueError, match=r"k: layout is .*; allowed: torch.strided"):
        cute_attn.attention(q, STRANGE[kind](k), v)


def test_out_may_not_share_memory_through_another_storage() -> None:
    base = torch.zeros(3, 2, 5, 64, dtype=torch.float16)
    k, v = torch.zeros(2, 2, 2, 5, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="out: its memory is shared with q"):
        cute_attn.attention(base[:2], k, v, out=torch.from_dlpack(base[1:]))


@pytest.mark.parametrize("device", [True, None, 1.5, "cpu"])
def test_warmups_take_cuda_devices(device: Any) -> None:
    with pytest.raises(ValueError, match=r"devices: one of them is .*; allowed: CUDA devices"):
        cute_attn.warmup(64, devices=[device])
