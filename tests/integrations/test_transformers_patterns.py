"""What is causal and what has a window: the model's mask says it, whatever its layers say; without a mask, the call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed (make test-torch)")
from transformers import (  # noqa: E402
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    BigBirdPegasusForConditionalGeneration,
    DynamicCache,
    MoshiConfig,
    MoshiForCausalLM,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    SplinterConfig,
    SplinterModel,
    StaticCache,
)
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.transformers import register  # noqa: E402
from cubin_runtime.integrations.transformers.attention import attention  # noqa: E402
from cubin_runtime.integrations.transformers.masks import mask  # noqa: E402
from tests.integrations.attention_stand_in import StandIn  # noqa: E402
from tests.integrations.small_models import assert_near, made, prompts, steps  # noqa: E402

pytestmark = pytest.mark.torch
NAME = "cubin_runtime_stand_in"
TOLERANCE = 1e-4
BOTH: dict[str, Any] = {
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "d_model": 64,
    "pad_token_id": 0,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}
ENCODER = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
# But for bart: decoders whose attention says that it is not causal, and encoders whose attention does not say so.
MODELS: dict[str, Any] = {
    "bigbird_pegasus decoder": lambda: BigBirdPegasusForCausalLM(BigBirdPegasusConfig(**BOTH)),
    "bigbird_pegasus": lambda: BigBirdPegasusForConditionalGeneration(
        BigBirdPegasusConfig(**BOTH, attention_type="original_full")
    ),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BOTH)),
    "nllb_moe": lambda: NllbMoeForConditionalGeneration(NllbMoeConfig(**BOTH, num_experts=2)),
    "splinter": lambda: SplinterModel(SplinterConfig(**ENCODER, intermediate_size=64)),
}


def built(make: Any) -> Any:
    """The model in eval mode; its queries and keys are large enough that attention is far from uniform."""
    register(NAME, StandIn().operators)
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1 and any(part in key for part in ("q_proj", "k_proj", "query", "key")):
                weight.mul_(6)
    return model


def outputs(model: Any, implementation: str, **given: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(prompts(2, 20), **given)[0]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_say_another_pattern_than_their_mask(name: str, padded: bool) -> None:
    model = built(MODELS[name])
    valid = torch.ones(2, 20, dtype=torch.long)
    # A model of two stacks adds to the encoder's mask of padding only if it is dense.
    valid[1, :7] = int(not padded or name == "bigbird_pegasus")
    # As many queries of the decoder as keys of the encoder, whose padding is not theirs.
    given = {"decoder_input_ids": prompts(2, 20)} if name in ("bart", "bigbird_pegasus", "nllb_moe") else {}
    ours, theirs = (outputs(model, one, attention_mask=valid, **given) for one in (NAME, "eager"))
    kept = slice(None) if given else valid.bool()
    assert_near(ours[kept], theirs[kept], TOLERANCE)


@pytest.mark.parametrize("cache", [lambda config: DynamicCache(config=config), lambda c: StaticCache(c, 40)])
def test_decoding_with_layers_that_say_that_they_are_not_causal(cache: Any) -> None:
    model = built(MODELS["bigbird_pegasus decoder"])
    results = []
    for implementation in (NAME, "eager"):
        model.set_attn_implementation(implementation)
        results.append(steps(model, prompts(2, 24), [20, 23, 24], cache(model.config)))
    for ours, theirs in zip(*results, strict=True):
        assert_near(ours, theirs, TOLERANCE)


def test_a_model_that_asks_for_no_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "ffn_dim": 64, "hidden_size": 64}
    model = built(lambda: MoshiForCausalLM(MoshiConfig(vocab_size=128, num_key_value_heads=4, **shape)))
    with monkeypatch.context() as patched:  # as before 5.24
        module = "transformers.models.moshi.modeling_moshi"
        patched.setattr(f"{module}.create_causal_mask", lambda *_, **__: None, raising=False)
        with pytest.raises(UsageError, match="attention_mask=None: MoshiAttention is causal, but its model asked for"):
            outputs(model, NAME)
    valid = torch.ones(2, 20, dtype=torch.long)
    ours, theirs = (outputs(model, one, attention_mask=valid) for one in (NAME, "eager"))
    assert_near(ours, theirs, TOLERANCE)


class Recorded:
    """Operators that keep the options of a call."""

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.operators = SimpleNamespace(even=self._call, ragged=self._call, cached=self._call)

    def _call(self, q: Any, *given: Any, **options: Any) -> Any:
        self.given, self.options = given, options
        return torch.zeros_like(q)


def causal(layer: Any = None, q_len: int = 3, form: Any = None, **given: Any) -> bool:
    """Whether attention is causal for a call with 5 keys."""
    recorded = Recorded()
    q, k = torch.zeros(1, 4, q_len, 64), torch.zeros(1, 2, 5, 64)
    layer = SimpleNamespace(is_causal=True, layer_idx=0) if layer is None else layer
    attention(recorded.operators, layer, q, k, k, form, **given)
    assert isinstance(recorded.options["causal"], bool)
    return bool(recorded.options["causal"])


def form_of(function: Any, **given: Any) -> Any:
    return mask(1, 3, 5, q_offset=2, mask_function=function, **given)


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize(
    "layer", [SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False), SimpleNamespace()]
)
def test_the_mask_decides_whatever_the_layer_and_the_call_say(layer: Any, said: bool | None) -> None:
    assert causal(layer, form=form_of(causal_mask_function), is_causal=said)
    assert causal(layer, form=form_of(None), is_causal=said)
    assert not causal(layer, form=form_of(bidirectional_mask_function), is_causal=said)


@pytest.mark.parametrize("function", [causal_mask_function, bidirectional_mask_function])
def test_padding_keeps_the_pattern(function: Any) -> None:
    valid = torch.tensor([[False, True, True, True, True]])
    assert causal(form=form_of(function, attention_mask=valid)) == (function is causal_mask_function)


@pytest.mark.parametrize("function", [causal_mask_function, bidirectional_mask_function])
def test_packed_sequences_keep_the_pattern(function: Any) -> None:
    packed = and_masks(function, packed_sequence_mask_function(torch.tensor([[0, 0, 1]])))
    form = mask(1, 3, 3, mask_function=packed)
    assert form.plain[0, 0, 0].tolist() == [0, 2, 3]
    assert causal(form=form) == (function is causal_mask_function)


def test_a_mask_of_ones_is_none() -> None:
    # Of the tokens so far, in a cache with room.
    lengths = mask(1, 3, 9, q_offset=2, attention_mask=torch.ones(1, 5, dtype=torch.bool))
    assert (lengths.dtype, lengths.plain[:, 0, 0, 0].tolist()) == (torch.int32, [5])
    whole = form_of(bidirectional_mask_function, attention_mask=torch.ones(1, 5, dtype=torch.bool))
    assert torch.equal(whole, form_of(bidirectional_mask_function))
    with pytest.raises(UsageError, match="attention_mask: 4 tokens for 5 keys, which are not causal"):
        form_of(bidirectional_mask_function, attention_mask=torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("offset", [0, torch.tensor(0), torch.tensor([7])])
def test_an_encoder_sees_every_key_wherever_its_queries_stand(offset: Any) -> None:
    form = mask(2, 3, 5, q_offset=offset, mask_function=bidirectional_mask_function)
    assert (form.dtype, tuple(form.shape)) == (torch.int16, (2, 1, 1, 5))


def test_room_in_a_cache_keeps_the_pattern() -> None:
    assert causal(SimpleNamespace(is_causal=False), form=mask(1, 3, 9, q_offset=2))


def test_without_a_mask_the_call_decides() -> None:
    assert causal(is_causal=True)
    assert not causal(is_causal=False)
    assert not causal(SimpleNamespace(is_causal=False))
    assert causal(SimpleNamespace(is_causal=False), is_causal=True)


@pytest.mark.parametrize("layer", [SimpleNamespace(is_causal=True), SimpleNamespace()])
def test_without_a_mask_a_layer_alone_does_not(layer: Any) -> None:
    with pytest.raises(UsageError, match="attention_mask=None: SimpleNamespace is causal"):
        causal(layer)
    assert causal(layer, q_len=1)


def test_running_sums_of_the_caller_have_the_pattern_of_the_layer() -> None:
    sums = torch.tensor([0, 3], dtype=torch.int32)
    for pattern in (True, False):
        layer = SimpleNamespace(is_causal=pattern)
        assert causal(layer, cu_seq_lens_q=sums, cu_seq_lens_k=sums) == pattern


def test_as_many_packed_sequences_as_tokens_of_two_rows_but_one() -> None:
    ids = torch.tensor([[0, 1, 2], [0, 0, 1]])  # their sums are as many as the keys and queries of a row
    form = mask(2, 3, 3, mask_function=and_masks(causal_mask_function, packed_sequence_mask_function(ids)))
    recorded, (q, k) = Recorded(), (torch.zeros(2, heads, 3, 64) for heads in (4, 2))
    attention(recorded.operators, SimpleNamespace(), q, k, k, form)
    assert recorded.given[2].tolist() == recorded.given[3].tolist() == [0, 1, 2, 3, 5, 6]


def test_running_sums_of_the_caller_come_before_those_of_the_mask() -> None:
    recorded, sums = Recorded(), torch.tensor([0, 1, 3], dtype=torch.int32)
    form = mask(
        1, 3, 3, mask_function=and_masks(causal_mask_function, packed_sequence_mask_function(torch.arange(3)[None]))
    )
    q, k = torch.zeros(1, 4, 3, 64), torch.zeros(1, 2, 3, 64)
    given = {"cu_seq_lens_q": sums, "cu_seq_lens_k": sums, "max_length_q": 2, "max_length_k": 2}
    attention(recorded.operators, SimpleNamespace(), q, k, k, form, **given)
    _, _, q_sums, k_sums, *bounds = recorded.given
    assert (q_sums is sums, k_sums is sums, bounds) == (True, True, [2, 2])


@pytest.mark.parametrize(
    "form", [mask(1, 3, 9, q_offset=2), form_of(None, attention_mask=torch.tensor([[False, True, True, True, True]]))]
)
def test_running_sums_of_the_caller_beside_another_form_are_refused(form: Any) -> None:
    sums = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(UsageError, match="attention_mask, cu_seq_lens_q: both"):
        causal(form=form, cu_seq_lens_q=sums, cu_seq_lens_k=sums)


def test_a_window_that_only_the_mask_has_is_refused() -> None:
    form = form_of(sliding_window_causal_mask_function(3))
    assert causal(form=form, sliding_window=3)
    with pytest.raises(UsageError, match="sliding_window=None: the mask that the model asked for has a sliding window"):
        causal(form=form)


def test_a_window_that_only_the_layer_has_is_refused() -> None:
    with pytest.raises(UsageError, match="sliding_window=3: the mask that the model asked for has none"):
        causal(form=form_of(causal_mask_function), sliding_window=3)


def test_a_window_that_is_not_causal_is_refused() -> None:
    with pytest.raises(UsageError, match="the pattern sliding_window_overlay"):
        form_of(and_masks(bidirectional_mask_function, sliding_window_overlay(3)))


def test_a_mask_for_other_keys_is_refused() -> None:
    with pytest.raises(UsageError, match=r"int16 of shape \(1, 61, 2, 6\) for 3 queries and 5 keys"):
        causal(form=mask(1, 3, 6, q_offset=3))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_a_dense_mask_of_integers_is_refused(heads: int, dtype: Any, q_len: int) -> None:
    if (heads, dtype, q_len) != (1, torch.int16, 1):  # which says nothing else than that every key is seen
        with pytest.raises(UsageError, match="a dense mask has a kernel only for at most 64"):
            causal(form=torch.ones(1, heads, q_len, 5, dtype=dtype), q_len=q_len)


@pytest.mark.parametrize("function", [causal_mask_function, sliding_window_causal_mask_function(3)])
@pytest.mark.parametrize("q_len", [1, 2, 3, 5])
def test_a_model_that_adds_its_mask_to_scores_itself_fails(function: Any, q_len: int) -> None:
    padding = torch.tensor([[False, True, True, True, True]])
    forms = [
        mask(1, q_len, 5, q_offset=5 - q_len, mask_function=function),
        mask(1, q_len, 5, mask_function=function),
        mask(1, q_len, 5, q_offset=5 - q_len, mask_function=function, attention_mask=padding),
        mask(1, q_len, 5, mask_function=and_masks(function, packed_sequence_mask_function(torch.arange(q_len)[None]))),
    ]
    for form in forms:
        with pytest.raises(UsageError, match=r"the model computes with its mask \((__r?add__|add)\)"):
            torch.zeros(1, 4, q_len, 5) + form
        # In a compiled forward pass it is a tensor like any other, of no size that scores have.
        with pytest.raises(RuntimeError, match="must match the size"):
            torch.zeros(1, 4, q_len, 5) + form.plain


@pytest.mark.parametrize(
    "function",
    [
        lambda form: form == 0,
        lambda form: form.masked_fill(form == 0, 1),
        lambda form: torch.cat((form, form)),
        lambda form: torch.where(form, 1, 0),
        lambda form: form.bool(),
        lambda form: bool(form[0, 0, 0, 0]),
        lambda form: torch.nn.functional.pad(form, (0, 1)),
    ],
)
def test_no_function_computes_with_a_mask(function: Any) -> None:
    with pytest.raises(UsageError, match="the model computes with its mask"):
        function(mask(1, 3, 5, q_offset=2))


def test_a_mask_may_be_moved_and_sliced_and_stays_opaque() -> None:
    form = mask(2, 3, 5, q_offset=2)
    moved = form.to("cpu").contiguous()[:1, :, :, :5].clone()
    assert (moved.shape, moved.dtype) == ((1, 61, 2, 5), torch.int16)
    with pytest.raises(UsageError, match="the model computes with its mask"):
        moved + 1


def test_a_mask_for_a_compiled_forward_pass_is_a_tensor_like_any_other() -> None:
    assert type(mask(2, 1, 5, q_offset=4, allow_is_causal_skip=False)) is torch.Tensor
    with pytest.raises(UsageError, match="the model computes with its mask"):  # as models with sparse attention do
        mask(2, 3, 5, q_offset=2, allow_is_causal_skip=False) + 1


@pytest.mark.parametrize("function", [causal_mask_function, bidirectional_mask_function])
@pytest.mark.parametrize("padding", [None, torch.tensor([[False, True, True, True, True]])])
def test_a_mask_is_made_in_a_compiled_forward_pass(function: Any, padding: Any) -> None:
    traced = torch.compile(form_of, fullgraph=True, backend="eager")
    form, plain = traced(function, attention_mask=padding), form_of(function, attention_mask=padding)
    assert type(form) is torch.Tensor
    assert torch.equal(form, getattr(plain, "plain", plain))


def test_a_mask_that_captures_values_is_refused_in_a_compiled_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    with pytest.raises(UsageError, match=r"mask: a pattern that captures values \(and_mask\), which a compiled"):
        form_of(sliding_window_causal_mask_function(2))


def test_a_mask_of_every_key_may_be_added_to_scores() -> None:
    scores = torch.rand(1, 4, 3, 5)
    assert torch.equal(scores, scores + form_of(bidirectional_mask_function))


def test_an_implementation_for_continuous_batching_needs_its_cache() -> None:
    model = built(lambda: made("llama"))
    model.set_attn_implementation(f"paged|{NAME}")
    if model.config._attn_implementation == NAME:
        pytest.skip("this transformers knows the prefix paged| for its own names alone")
    with pytest.raises(UsageError, match="generate_batch"):
        outputs(model, f"paged|{NAME}", attention_mask=torch.ones(2, 20, dtype=torch.long))
    assert AttentionInterface()[f"paged|{NAME}"] is not AttentionInterface()[NAME]


def test_a_window_without_a_mask_is_refused() -> None:
    assert causal(form=None, is_causal=True, sliding_window=5)
    with pytest.raises(UsageError, match="attention_mask=None, sliding_window=4: 5 keys"):
        causal(form=None, is_causal=True, sliding_window=4)
