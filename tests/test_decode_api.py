"""``cute_attn.decode`` and ``merge`` on CPU tensors: every option, and the message of every wrong argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_attn
from cute_attn import ContiguousCache, PagedCache, reference
from tests import decode_cases as cases
from tests.decode_cases import Arguments, call, contiguous, lengths, normal, paged


@pytest.mark.parametrize("case", cases.ALL)
def test_options_mean_what_the_reference_says(case: str) -> None:
    arguments = cases.make(case)
    out, lse = cute_attn.decode(**arguments, return_lse=True)
    exact, exact_lse = reference.decode(**cases.for_reference(arguments), return_lse=True)
    torch.testing.assert_close((out, lse), (exact, exact_lse), rtol=0, atol=0)
    assert out.dtype == arguments["q"].dtype
    assert out.is_contiguous()
    assert lse.dtype == torch.float32
    assert lse.shape == out.shape[:-1]
    assert torch.equal(cute_attn.decode(**arguments), out)
    into = torch.full_like(out, math.nan)
    assert cute_attn.decode(**arguments, out=into) is into
    assert torch.equal(into, out)
    into.fill_(math.nan)
    same, same_lse = cute_attn.decode(**arguments, out=into, return_lse=True)
    assert same is into
    assert torch.equal(into, out)
    assert torch.equal(same_lse, lse)


def test_lengths_on_the_host() -> None:
    arguments = call()
    expected = cute_attn.decode(**arguments)
    for given in ([0, 40, 5], (0, 40, 5)):
        assert torch.equal(cute_attn.decode(**(arguments | {"lengths": given})), expected)
    same = cute_attn.decode(**(arguments | {"lengths": 7}))
    assert torch.equal(same, cute_attn.decode(**(arguments | {"lengths": lengths(7, 7, 7)})))


@pytest.mark.parametrize("shape", [(0, 2, 4, 16), (3, 0, 4, 16), (3, 2, 0, 16), (0, 4, 16)])
def test_empty(shape: tuple[int, ...]) -> None:
    cache = contiguous(batch=shape[0])
    out, lse = cute_attn.decode(normal(*shape), cache, lengths(1, 2, 3)[: shape[0]], return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:-1]


def test_no_capacity() -> None:
    none = normal(3, 0, 2, 16)
    for sinks, expected in ((None, -math.inf), (torch.full((4,), 0.5), 0.5)):
        out, lse = cute_attn.decode(
            normal(3, 2, 4, 16), ContiguousCache(none, none), [0, 0, 0], sinks=sinks, return_lse=True
        )
        assert (out == 0).all()
        assert (lse == expected).all()


def test_autocast_casts_q_to_the_cache() -> None:
    arguments = call(dtype=torch.bfloat16)
    quantised = call(contiguous(torch.int8, 0.1), torch.bfloat16)
    for one in (arguments, quantised):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = cute_attn.decode(**(one | {"q": one["q"].float()}))
        assert torch.equal(out, cute_attn.decode(**one))
    half = call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cute_attn.decode(**(half | {"q": half["q"].float()}))
    assert torch.equal(out, cute_attn.decode(**half))


def test_deterministic_mode() -> None:
    expected = cute_attn.decode(**call())
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(cute_attn.decode(**call()), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_gradient_is_refused_and_never_pretended() -> None:
    arguments = call() | {"sinks": cases.sinks().requires_grad_()}
    with pytest.raises(ValueError, match=r"sinks: requires_grad is True; allowed: False.*no backward.*no_grad"):
        cute_attn.decode(**arguments)
    with torch.no_grad():
        assert not cute_attn.decode(**arguments).requires_grad
    arguments = call()
    arguments["q"].requires_grad_()
    with pytest.raises(ValueError, match="q: requires_grad is True"):
        cute_attn.decode(**arguments)


class TestChecked:
    """``check=True`` reads what lies on the device."""

    def test_right_values_pass(self) -> None:
        for arguments in (call(), call(paged()), call(paged(two_tables=True))):
            assert torch.equal(cute_attn.decode(**arguments, check=True), cute_attn.decode(**arguments))

    @pytest.mark.parametrize("page", [-1, 30])
    @pytest.mark.parametrize("which", [0, 1])
    def test_pages_beyond_the_pool(self, page: int, which: int) -> None:
        arguments = call(paged(two_tables=True))
        table = arguments["cache"].page_table
        table[1, which, 3] = page
        with pytest.raises(ValueError, match=f"page_table: page 3 of sequence 1 is {page}; allowed: 0 to 29"):
            cute_attn.decode(**arguments, check=True)

    def test_pages_that_no_query_sees_may_be_anything(self) -> None:
        arguments = call(paged())
        table = arguments["cache"].page_table
        table[0] = -7
        table[2, 1:] = 2**30
        cute_attn.decode(**arguments, check=True)
        table[1, :4] = -7
        cute_attn.decode(**arguments, check=True, window=7)
        with pytest.raises(ValueError, match="page_table: page 3 of sequence 1 is -7"):
            cute_attn.decode(**arguments, check=True, window=8)


def misaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].reshape(x.shape)


def change(**changes: Any) -> Arguments:
    """A call with some arguments replaced, or passed through a function."""
    arguments = call()
    for name, value in changes.items():
        arguments[name] = value(arguments.get(name)) if callable(value) else value
    return arguments


def out_of(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda _: function(normal(3, 2, 4, 16))


Wrong = tuple[Arguments, str]
WRONG: dict[str, Wrong] = {
    # Types and devices.
    "q no tensor": (change(q=[1.0]), "q: its type is list; allowed: torch.Tensor"),
    "cache no cache": (change(cache=(1, 2)), "cache: its type is tuple; allowed: ContiguousCache, PagedCache"),
    "out no tensor": (change(out=3), "out: its type is int; allowed: None, or torch.Tensor"),
    "sinks no tensor": (change(sinks=[0.0] * 4), "sinks: its type is list; allowed: None, or torch.Tensor"),
    "fp32": (change(q=Tensor.float), "q: dtype is torch.float32; allowed: torch.float16, torch.bfloat16"),
    "other dtype": (change(q=Tensor.bfloat16), "cache: dtype is torch.float16; allowed: torch.bfloat16, that of q, or"),
    "device": (change(q=lambda x: x.to("meta"), lengths=lambda x: x.to("meta")),
               "cache: device is cpu; allowed: meta, that of q"),
    # Shapes.
    "q of 2": (change(q=lambda x: x[0, 0]), "q: shape is (4, 16); allowed: (batch, q_len, heads, head_dim) or (batch"),
    "q of 5": (change(q=lambda x: x[None]), "q: shape is (1, 3, 2, 4, 16); allowed: (batch, q_len"),
    "batch of q": (change(q=lambda x: x[:2]), "lengths: length is 3; allowed: 2, the batch of q"),
    "packed batch": (change(q=lambda x: x[0]), "q: its number of tokens is 2; allowed: a multiple of 3, the length of"),
    "batch of the cache": (change(cache=contiguous(batch=2)), "cache: batch is 2; allowed: 3, the length of lengths"),
    "head_dim": (change(q=lambda x: x[..., :8]), "q: head_dim is 8; allowed: 16, that of the cache"),
    "heads": (change(q=lambda x: x[:, :, :3]), "q: its number of heads is 3; allowed: a multiple of the cache's 2"),
    # Memory.
    "last dimension": (change(q=lambda x: x.mT.contiguous().mT), "q: stride is (128, 64, 1, 4); allowed: 1 in the las"),
    "row stride": (change(q=lambda x: torch.nn.functional.pad(x, (0, 4))[..., :16]),
                   "q: stride is (160, 80, 20, 1); allowed: multiples of 8 elements before the last dimension"),
    "address": (change(q=misaligned), "q: address of its first element is 0x"),
    # Lengths.
    "lengths int64": (change(lengths=Tensor.long), "lengths: dtype is torch.int64; allowed: torch.int32"),
    "lengths of 2": (change(lengths=lambda x: x[None]), "lengths: shape is (1, 3); allowed: (batch,)"),
    "lengths text": (change(lengths="123"), "lengths: its type is str; allowed: torch.Tensor, an int, or a list of in"),
    "lengths floats": (change(lengths=[1.0, 2, 3]), "lengths: its element 0 is 1.0; allowed: an int"),
    "lengths bool": (change(lengths=True), "lengths: its type is bool; allowed: torch.Tensor, an int, or a list of in"),
    "lengths too few": (change(lengths=[1, 2]), "lengths: length is 2; allowed: 3, the batch of q"),
    "too long": (change(lengths=lengths(1, 41, 2)), "lengths: its element 1 is 41; allowed: 0 to 40, the capacity of"),
    "list too long": (change(lengths=[1, 2, 41]), "lengths: its element 2 is 41; allowed: 0 to 40, the capacity of"),
    "int too long": (change(lengths=41), "lengths: its element 0 is 41; allowed: 0 to 40, the capacity of the cache"),
    "negative": (change(lengths=[-1, 2, 3]), "lengths: its element 0 is -1; allowed: 0 to 40, the capacity of the ca"),
    "beyond the pages": (call(paged()) | {"lengths": lengths(1, 41, 2)}, "lengths: its element 1 is 41; allowed: 0 to"),
    # Options.
    "window 0": (change(window=0), "window: it is 0; allowed: None or -1 (all tokens), or an int from 1, own token co"),
    "window -2": (change(window=-2), "window: it is -2; allowed: None or -1 (all tokens), or an int from 1"),
    "window pair": (change(window=(3, 0)), "window: it is (3, 0); allowed: None or -1 (all tokens), or an int from 1"),
    "window float": (change(window=3.0), "window: it is 3.0; allowed: None or -1"),
    "window bool": (change(window=True), "window: it is True; allowed: None or -1"),
    "softcap negative": (change(softcap=-1.0), "softcap: it is -1.0; allowed: None or 0 (no cap), or from 1e-6 to 1e6"),
    "softcap inf": (change(softcap=math.inf), "softcap: it is inf; allowed: None or 0 (no cap), or from 1e-6 to 1e6"),
    "softcap nan": (change(softcap=math.nan), "softcap: it is nan; allowed: None or 0 (no cap)"),
    "softcap text": (change(softcap="1"), "softcap: its type is str; allowed: None, or a float from 0"),
    "softcap bool": (change(softcap=True), "softcap: its type is bool; allowed: None, or a float from 0"),
    "scale nan": (change(scale=math.nan), "scale: it is nan; allowed: None, or a finite float"),
    "scale text": (change(scale="1"), "scale: its type is str; allowed: None, or a finite float"),
    "sinks dtype": (change(sinks=torch.zeros(4).half()), "sinks: dtype is torch.float16; allowed: torch.float32"),
    "sinks shape": (change(sinks=torch.zeros(2)), "sinks: shape is (2,); allowed: (4,), an element a head of q"),
    "sinks device": (change(sinks=torch.zeros(4, device="meta")), "sinks: device is meta; allowed: cpu, that of q"),
    "num_splits 0": (change(num_splits=0), "num_splits: it is 0; allowed: None, or an int from 1"),
    "num_splits float": (change(num_splits=2.0), "num_splits: it is 2.0; allowed: None, or an int from 1"),
    "num_splits huge": (change(num_splits=65536), "num_splits: it is 65536; allowed: at most 65535"),
    "split_size 0": (change(split_size=0), "split_size: it is 0; allowed: None, or an int from 1"),
    "split_size bool": (change(split_size=True), "split_size: it is True; allowed: None, or an int from 1"),
    "both splits": (change(num_splits=2, split_size=64), "split_size: it is 64; allowed: None, as num_splits is given"),
    "return_lse": (change(return_lse=1), "return_lse: it is 1; allowed: True or False"),
    "check": (change(check="yes"), "check: it is 'yes'; allowed: True or False"),
    "config name": (change(config="fast"), "config: it is 'fast'; allowed: "),
    "config type": (change(config=3), "config: its type is int; allowed: None, a StreamsConfig, a RolesConfig, or a n"),
    # Out.
    "out shape": (change(out=out_of(lambda x: x[:, :1])), "out: shape is (3, 1, 4, 16); allowed: (3, 2, 4, 16), that "),
    "out dtype": (change(out=out_of(Tensor.float)), "out: dtype is torch.float32; allowed: torch.float16, that of q"),
    "out device": (change(out=out_of(lambda x: x.to("meta"))), "out: device is meta; allowed: cpu, that of q"),
    "out last": (change(out=out_of(lambda x: x.mT.contiguous().mT)), "out: stride is (128, 64, 1, 4); allowed: 1 in t"),
    "out address": (change(out=out_of(misaligned)), "out: address of its first element"),
    "out expanded": (change(out=out_of(lambda x: x[:, :1].expand(-1, 2, -1, -1))),
                     "out: stride is (128, 0, 16, 1); allowed: strides that give each element its own memory"),
    "out gradient": (change(out=out_of(Tensor.requires_grad_)), "out: requires_grad is True"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        cute_attn.decode(**arguments)
    assert message in str(caught.value)


def test_out_must_not_share_memory_with_an_input() -> None:
    arguments = call()
    with pytest.raises(ValueError, match="out: its memory is shared with q; allowed: memory that no input uses"):
        cute_attn.decode(**arguments, out=arguments["q"])
    cache = arguments["cache"]
    inside = cache.v.flatten()[: arguments["q"].numel()].view(arguments["q"].shape)
    with pytest.raises(ValueError, match="out: its memory is shared with v"):
        cute_attn.decode(**arguments, out=inside)


WRONG_PARTS: dict[str, tuple[Any, str]] = {
    "a tensor": ((normal(2, 3, 16), [normal(2, 3)]), "outs: its type is Tensor; allowed: a list or tuple of torch"),
    "no tensors": (([1.0], [normal(2, 3)]), "outs: its type is list; allowed: a list or tuple of torch.Tensor"),
    "none": (([], []), "outs: its length is 0; allowed: at least 1"),
    "numbers": (([normal(2, 16)] * 2, [normal(2).float()]), "lses: its length is 1; allowed: 2, that of outs"),
    "dtype": (([normal(2, 16).double()], [normal(2).float()]), "outs: dtype is torch.float64; allowed: torch.floa"),
    "dtypes": (([normal(2, 16), normal(2, 16).float()], [normal(2).float()] * 2),
               "outs: dtype of part 1 is torch.float32; allowed: torch.float16, that of part 0"),
    "shapes": (([normal(2, 16), normal(3, 16)], [normal(2).float()] * 2),
               "outs: shape of part 1 is (3, 16); allowed: (2, 16), that of 0"),
    "lse dtype": (([normal(2, 16)], [normal(2)]), "lses: dtype of part 0 is torch.float16; allowed: torch.float32"),
    "lse shape": (([normal(2, 16)], [normal(3).float()]), "lses: shape of part 0 is (3,); allowed: (2,), that of "),
    "device": (([normal(2, 16)], [normal(2).float().to("meta")]), "lses: device of part 0 is meta; allowed: cpu"),
}  # fmt: skip


class TestMerge:
    def parts(self, dtype: torch.dtype = torch.float16, cuts: tuple[int, ...] = (7, 25)) -> tuple[Any, Any, Any]:
        """Partial results over a sequence's parts, and those over the whole."""
        cache, q = contiguous(dtype), normal(3, 1, 4, 16, dtype=dtype)
        whole = cute_attn.decode(q, cache, [40, 40, 40], return_lse=True)
        outs, lses = [], []
        for start, stop in zip((0, *cuts), (*cuts, 40), strict=True):
            part = ContiguousCache(cache.k[:, start:stop], cache.v[:, start:stop])
            out, lse = cute_attn.decode(q, part, [stop - start] * 3, return_lse=True)
            outs.append(out)
            lses.append(lse)
        return outs, lses, whole

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("cuts", [(), (20,), (7, 25), (0,), (40, 40)])
    def test_parts_make_the_whole(self, dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
        outs, lses, whole = self.parts(dtype, cuts)
        out, lse = cute_attn.merge(outs, lses)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        # Each part was rounded to 16 bits, and then their sum.
        torch.testing.assert_close((out, lse), whole, rtol=0, atol=4 * torch.finfo(dtype).eps)
        torch.testing.assert_close((out, lse), reference.merge(outs, lses))
        if len(outs) == 1 or 0 in cuts:
            torch.testing.assert_close((out, lse), whole, rtol=0, atol=0)

    def test_float32_parts(self) -> None:
        outs, lses, whole = self.parts()
        out, _ = cute_attn.merge([x.float() for x in outs], tuple(lses))
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, whole[0].float(), rtol=2e-3, atol=2e-3)

    def test_empty_parts_count_nothing(self) -> None:
        out, lse = normal(3, 4, 16), normal(3, 4).float()
        nothing, none = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
        merged = cute_attn.merge([nothing, out, nothing], [none, lse, none])
        torch.testing.assert_close(merged, (out, lse), rtol=0, atol=0)
        merged = cute_attn.merge([nothing, nothing], [none, none])
        torch.testing.assert_close(merged, (torch.zeros_like(out), none), rtol=0, atol=0)

    def test_large_lses(self) -> None:
        out, lse = normal(3, 4, 16), torch.full((3, 4), -2e5)
        merged, merged_lse = cute_attn.merge([out, out], [lse, lse])
        torch.testing.assert_close(merged, out)
        torch.testing.assert_close(merged_lse, lse + math.log(2))

    @pytest.mark.parametrize("case", WRONG_PARTS)
    def test_wrong_arguments_are_named(self, case: str) -> None:
        arguments, message = WRONG_PARTS[case]
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            cute_attn.merge(*arguments)
        assert message in str(caught.value)

    def test_a_gradient_is_refused(self) -> None:
        with pytest.raises(ValueError, match="outs: requires_grad is True"):
            cute_attn.merge([normal(2, 16).requires_grad_()], [normal(2).float()])


def test_warmup_without_a_gpu_has_nothing_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert cute_attn.warmup_decode(head_dim=64) == []


def test_a_16_bit_cache_with_a_scale_is_refused_by_the_op_too() -> None:
    cache = contiguous()
    with pytest.raises(ValueError, match=r"scale: it is .*; allowed: None, as a cache of torch\.float16"):
        torch.ops.cute_attn.decode(normal(3, 2, 4, 16), cache.k, cache.v, lengths(), None, 0.5)
    with pytest.raises(ValueError, match=r"page_table: dtype is torch\.int64"):
        PagedCache(cache.k, cache.k, torch.zeros(3, 4, dtype=torch.int64))


CHECKED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype of lengths": ({"lengths": torch.ones(3, dtype=torch.float32)}, "lengths: dtype is torch.float32"),
    "shape of lengths": ({"lengths": torch.ones(1, 3, dtype=torch.int32)}, r"lengths: shape is \(1, 3\)"),
    "rank of q": ({"q": torch.tensor(1.0).half()}, r"q: shape is \(\)"),
    "window": ({"window": "5"}, "window: it is '5'"),
}


@pytest.mark.parametrize("case", CHECKED)
def test_values_are_looked_at_only_where_tensors_fit(case: str) -> None:
    changes, message = CHECKED[case]
    arguments = {**call(paged()), "check": True, **changes}
    with pytest.raises(ValueError, match=message):
        cute_attn.decode(**arguments)


def test_lengths_name_the_element_that_is_no_int() -> None:
    with pytest.raises(ValueError, match=r"lengths: its element 1 is 2.0; allowed: an int"):
        cute_attn.decode(**{**call(paged()), "lengths": [1, 2.0, 3]})


def test_a_huge_split_size_is_one_part() -> None:
    arguments = call(contiguous())
    assert torch.equal(cute_attn.decode(**arguments, split_size=2**70), cute_attn.decode(**arguments))


@pytest.mark.parametrize("argument", ["head_dim", "dtypes", "cache_dtypes", "page_size", "window", "rows", "devices"])
def test_warmup_of_nothing_is_refused(argument: str) -> None:
    arguments: dict[str, Any] = {"head_dim": 64, argument: []}
    with pytest.raises(ValueError, match=f"{argument}: its length is 0; allowed: at least 1"):
        cute_attn.warmup_decode(**arguments)


def test_warmup_of_a_cache_that_no_query_reads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache_dtypes: it is torch.bfloat16; allowed: .* one of torch.float16"):
        cute_attn.warmup_decode(64, dtypes=torch.float16, cache_dtypes=torch.bfloat16)


def test_merging_keeps_the_sign_of_zero() -> None:
    out = torch.tensor([[-0.0, 0.0, 1.0]])
    lse, none = torch.zeros(1), torch.full((1,), -math.inf)
    for outs, lses in (([out], [lse]), ([out, out + 1], [lse, none]), ([out + 1, out], [none, lse])):
        merged, _ = cute_attn.merge(outs, lses)
        assert torch.equal(merged.signbit(), out.signbit())
        assert torch.equal(merged, out)
