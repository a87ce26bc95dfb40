"""One forward of the engine: the next token of many sequences and the prompts of new ones, side by side.

The model's own modules compute it under a plan, so any family that the learner can train can be sampled. The weights
are the learner's parameters themselves, except where a packed copy of the linear layers is measurably faster: adapters
are merged into the copy (never into the base), and bfloat16 arithmetic gets bfloat16 weights.

Shapes: B decoding sequences, S spans, T tokens of a forward, H query heads, N key/value heads, D head width,
W width of hidden states, R rows of a slab, M members of a row, C longest length in a slab.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thundersyncrl.learner.linear import linear
from thundersyncrl.learner.policy import Policy
from thundersyncrl.rollout.kv_cache import CacheShape, Row, Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sequence's keys and values are: a shared prompt's row first, then its own."""

    own: Row
    prompt: Row | None = None

    @property
    def length(self) -> int:
        """Tokens whose keys and values are written; the position of the next one."""
        return self.own.length + (self.prompt.length if self.prompt else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens to prefill at the end of a place."""

    place: Place
    token_ids: tuple[int, ...]


class Decoder:
    """Runs forwards with the policy's weights as of the last `refresh`."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self._copies: list[_PackedLinear] = []
        self.sampled = self._with_packed_copies(policy)
        """The policy with packed copies in place of the layers that gain from one."""

    @property
    def cache_shape(self) -> CacheShape:
        config = self._policy.config
        heads = int(config.num_attention_heads)
        return CacheShape(
            num_layers=int(config.num_hidden_layers),
            num_kv_heads=int(config.num_key_value_heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            dtype=self._policy.compute_dtype,
            device=self._policy.device,
        )

    def refresh(self) -> None:
        """Bring packed copies up to the policy's parameters; weights that are shared need nothing."""
        for packed in self._copies:
            packed.refresh()

    def forward(self, token_ids: Sequence[int], places: Sequence[Place], spans: Sequence[Span]) -> Tensor:
        """Return last hidden states [B + S, W]: of each decoding token, then of the last token of each span.

        Keys and values of all tokens are written, and the lengths of the places' own rows grow.

        Args:
            token_ids: [B] one token for each of `places`.
            places: [B]
            spans: no two with the same own row, and none that reads a row which another writes.
        """
        device = self._policy.device
        plan = StepPlan(places, spans, device)
        ids = [*token_ids, *(token for span in spans for token in span.token_ids)]
        positions = [place.length for place in places]
        for span in spans:
            positions.extend(range(span.place.length, span.place.length + len(span.token_ids)))
        hidden = self.sampled.hidden(
            torch.tensor([ids], device=device), torch.tensor([positions], device=device), plan
        )[0]
        for place in places:
            place.own.length += 1
        for span in spans:
            span.place.own.length += len(span.token_ids)
        return hidden.index_select(0, plan.last_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [B, V] in at least float32 for hidden states [B, W]."""
        return self.sampled.logits(hidden)

    def _with_packed_copies(self, policy: Policy) -> Policy:
        sources = _packed_sources(policy.decoder, policy.compute_dtype)
        head_source = _packed_source(policy.head, policy.compute_dtype)
        if not sources and head_source is None:
            return policy
        # the copied modules share every parameter; only the layers that gain from a copy are replaced
        shared = {id(parameter): parameter for parameter in policy.decoder.parameters()}
        decoder = copy.deepcopy(policy.decoder, cast("dict[int, object]", shared))
        for name, source in sources.items():
            parent, _, child = name.rpartition(".")
            setattr(decoder.get_submodule(parent), child, self._pack(source))
        head = policy.head if head_source is None else self._pack(head_source)
        return dataclasses.replace(policy, decoder=decoder, head=head)

    def _pack(self, source: _Source) -> _PackedLinear:
        self._copies.append(_PackedLinear(source, self._policy.compute_dtype))
        return self._copies[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where a packed copy gets its numbers."""

    weight: Callable[[], Tensor]
    bias: Tensor | None


class _PackedLinear(nn.Module):
    """A linear layer with a copy of its weight, made anew from the source at each refresh."""

    weight: Tensor

    def __init__(self, source: _Source, dtype: torch.dtype):
        super().__init__()
        self._source = source
        self._dtype = dtype
        self.register_buffer("weight", torch.empty(0), persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        weight = self._source.weight()
        if self.weight.shape != weight.shape:
            # input-major memory: 1.1 to 1.2 times as fast for 8 to 64 rows in float32 on a CPU
            self.weight = torch.empty(weight.shape[::-1], dtype=self._dtype, device=weight.device).t()
        self.weight.copy_(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, self._source.bias)


def _packed_sources(decoder: nn.Module, dtype: torch.dtype) -> dict[str, _Source]:
    """Return the layers that gain from a packed copy, by name; parts of such a layer aren't looked at."""
    found: dict[str, _Source] = {}
    for name, module in decoder.named_modules():
        if not any(name.startswith(f"{outer}.") for outer in found):
            source = _packed_source(module, dtype)
            if source is not None:
                found[name] = source
    return found


def _packed_source(module: nn.Module, dtype: torch.dtype) -> _Source | None:
    base = getattr(module, "base_layer", None)
    if isinstance(base, nn.Linear) and _is_lora(module):
        # unmerged adapters made a step of 64 sequences (135M parameters, rank 16, two cores) 1.2 times as slow
        return _Source(weight=lambda: _merged(module), bias=base.bias)
    if isinstance(module, nn.Linear) and dtype is torch.bfloat16:
        # autocast would convert the whole weight again at each step
        return _Source(weight=lambda: module.weight, bias=module.bias)
    return None


def _is_lora(module: nn.Module) -> bool:
    from peft.tuners.lora import Linear as LoraLinear

    return isinstance(module, LoraLinear)


def _merged(module: Any) -> Tensor:
    """Return W + sum (alpha / rank) B A of a PEFT layer as a new tensor; the base weight stays as it is."""
    weight = module.base_layer.weight.detach().clone()
    for name in module.active_adapters:
        weight += module.get_delta_weight(name)
    return weight


class StepPlan:
    """Attention of one forward: decoding tokens first, one each, then the spans."""

    def __init__(self, places: Sequence[Place], spans: Sequence[Span], device: torch.device):
        self._num_decoding = len(places)
        self._spans = spans
        own = [(place.own, place.own.length + 1) for place in places]
        self._own = _SlabReads(own, range(len(places)), device)
        with_prompt = [i for i, place in enumerate(places) if place.prompt]
        prompts = [(row, row.length) for place in places if (row := place.prompt)]
        self._prompts = _SlabReads(prompts, with_prompt, device)
        self._with_prompt = torch.tensor(with_prompt, device=device)
        ends = itertools.accumulate((len(span.token_ids) for span in spans), initial=len(places))
        last = [*range(len(places)), *(end - 1 for end in list(ends)[1:])]
        self.last_tokens = torch.tensor(last, device=device)
        """[B + S] index of each decoding token and of each span's last token."""
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        outputs: list[Tensor] = []
        if self._num_decoding:
            new = slice(0, self._num_decoding)
            q, k, v = (states[0, :, new].transpose(0, 1) for states in (query, key, value))
            outputs.append(self._decode(layer, q * scaling, k, v).to(query.dtype))
        start = self._num_decoding
        for span in self._spans:
            end = start + len(span.token_ids)
            q, k, v = (states[0, :, start:end] for states in (query, key, value))
            outputs.append(self._prefill(layer, span, q, k, v, scaling))
            start = end
        return torch.cat(outputs).unsqueeze(0)

    def _decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [B, H, D]; a token sees its prompt's row, shared with its group, and its own row."""
        self._own.write(layer, key, value)
        output, log_sum = self._own.attend(layer, query)
        if not len(self._with_prompt):
            return output
        prompt_output, prompt_log_sum = self._prompts.attend(layer, query)
        # the softmax over both parts, from their outputs x, y and log-sum-exps a, b: (e^a x + e^b y) / (e^a + e^b)
        share = torch.sigmoid(prompt_log_sum - log_sum[self._with_prompt])
        if len(self._with_prompt) == self._num_decoding:
            return torch.lerp(output, prompt_output, share.unsqueeze(-1))
        mixed = torch.lerp(output[self._with_prompt], prompt_output, share.unsqueeze(-1))
        return output.index_copy(0, self._with_prompt, mixed)

    def _prefill(self, layer: int, span: Span, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return [T, H, D] of a span, causal over all that its place holds."""
        row, prompt = span.place.own, span.place.prompt
        num_heads, num_tokens, width = query.shape
        end = row.length + num_tokens
        states: list[Tensor] = []
        for states_L, prompt_L, new in (
            (row.slab.keys_L, prompt.slab.keys_L if prompt else (), key),
            (row.slab.values_L, prompt.slab.values_L if prompt else (), value),
        ):
            own = states_L[layer][row.index]
            own[:, row.length : end] = new
            own = own[:, :end]
            states.append(torch.cat([prompt_L[layer][prompt.index, :, : prompt.length], own], 1) if prompt else own)
        keys, values = states
        num_kv_heads = keys.shape[0]
        repeats = num_heads // num_kv_heads
        mask = self._mask(num_tokens, keys.shape[1], repeats, keys)
        # the query heads of one key head become rows, so that keys and values aren't repeated
        rows = query.to(keys.dtype).reshape(num_kv_heads, repeats * num_tokens, width)
        out = F.scaled_dot_product_attention(rows[None], keys[None], values[None], attn_mask=mask, scale=scaling)
        return out.reshape(num_heads, num_tokens, width).transpose(0, 1).to(query.dtype)

    def _mask(self, num_tokens: int, num_keys: int, repeats: int, like: Tensor) -> Tensor:
        shape = (num_tokens, num_keys, repeats)
        if shape not in self._masks:
            hidden = torch.full((num_tokens, num_keys), -torch.inf, dtype=like.dtype, device=like.device)
            self._masks[shape] = hidden.triu(diagonal=num_keys - num_tokens + 1).repeat(repeats, 1)
        return self._masks[shape]


class _SlabReads:
    """One new token for each of several rows: reads the rows of each slab in one product.

    Several tokens may read one row (the members of a group their prompt's): they become rows of one product.

    Args:
        rows: [B] row and number of its tokens to read.
        queries: [B] index of each token's query in the forward.
        device: of the model.
    """

    def __init__(self, rows: Sequence[tuple[Row, int]], queries: Sequence[int], device: torch.device):
        by_slab: dict[int, list[tuple[int, Row, int]]] = defaultdict(list)
        for i, (row, length) in enumerate(rows):
            by_slab[id(row.slab)].append((i, row, length))
        self._reads = [_SlabRead(reads, queries, device) for reads in by_slab.values()]
        # outputs come slab by slab and slot by slot; put them in the order of the rows
        order, offset = [0] * len(rows), 0
        for read in self._reads:
            for i, slot in read.slots.items():
                order[i] = offset + slot
            offset += read.num_slots
        self._order = torch.tensor(order, device=device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values [B, N, D] of the last token of each row."""
        for read in self._reads:
            read.write(layer, key, value)

    def attend(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [B, H, D] and log-sum-exps [B, H] of scaled queries [., H, D]."""
        outputs, log_sums = zip(*(read.attend(layer, query) for read in self._reads), strict=True)
        return torch.cat(outputs).index_select(0, self._order), torch.cat(log_sums).index_select(0, self._order)


class _SlabRead:
    """Tokens that read rows of one slab."""

    def __init__(self, reads: Sequence[tuple[int, Row, int]], queries: Sequence[int], device: torch.device):
        self._slab: Slab = reads[0][1].slab
        first, last = min(row.index for _, row, _ in reads), max(row.index for _, row, _ in reads)
        members: dict[int, list[int]] = defaultdict(list)
        for i, row, _ in reads:
            members[row.index].append(i)
        self._num_members = max(len(m) for m in members.values())
        self._rows = slice(first, last + 1)
        self._num_rows = last + 1 - first
        self.num_slots = self._num_rows * self._num_members
        self.slots = {
            i: (index - first) * self._num_members + j for index, m in members.items() for j, i in enumerate(m)
        }
        # slots without a token, in rows that others own, repeat some query; their outputs are never read
        gather = [queries[reads[0][0]]] * self.num_slots
        for i, slot in self.slots.items():
            gather[slot] = queries[i]
        self._gather = torch.tensor(gather, device=device)
        self._batch = torch.tensor([queries[i] for i, _, _ in reads], device=device)
        self._index = torch.tensor([row.index for _, row, _ in reads], device=device)
        self._position = torch.tensor([length - 1 for _, _, length in reads], device=device)
        self._length = max(length for _, _, length in reads)
        self._mask = self._padding(reads, first, device)

    def _padding(self, reads: Sequence[tuple[int, Row, int]], first: int, device: torch.device) -> Tensor | None:
        lengths = {row.index: length for _, row, length in reads}
        if set(lengths.values()) == {self._length}:
            return None
        per_row = torch.tensor([lengths.get(first + i, self._length) for i in range(self._num_rows)], device=device)
        hidden = torch.arange(self._length, device=device) >= per_row[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._slab.keys_L[0].dtype, device=device)
        mask.masked_fill_(hidden, -torch.inf)
        return mask[:, None, None]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        for states, new in ((self._slab.keys_L[layer], key), (self._slab.values_L[layer], value)):
            states[self._index, :, self._position] = new.index_select(0, self._batch).to(states.dtype)

    def attend(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [R M, H, D] and log-sum-exps [R M, H]."""
        keys = self._slab.keys_L[layer][self._rows, :, : self._length]
        values = self._slab.values_L[layer][self._rows, :, : self._length]
        rows, members, kv_heads, width = self._num_rows, self._num_members, keys.shape[1], keys.shape[3]
        heads = query.shape[1]
        # [R, N, M (H/N), D]: the query heads of one key head, of all members, are rows of one product
        grouped = query.index_select(0, self._gather).to(keys.dtype)
        grouped = grouped.view(rows, members, kv_heads, -1, width).transpose(1, 2)
        scores = torch.bmm(grouped.reshape(rows * kv_heads, -1, width), keys.flatten(0, 1).transpose(1, 2))
        if self._mask is not None:
            scores.view(rows, kv_heads, -1, self._length).add_(self._mask)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        log_sums = torch.logsumexp(scores, dim=-1, keepdim=True)
        shares = scores.sub_(log_sums).exp_().to(values.dtype)
        output = torch.bmm(shares, values.flatten(0, 1)).to(scores.dtype)
        output = output.view(rows, kv_heads, members, -1, width).transpose(1, 2)
        log_sums = log_sums.view(rows, kv_heads, members, -1).transpose(1, 2)
        return output.reshape(-1, heads, width), log_sums.reshape(-1, heads)
