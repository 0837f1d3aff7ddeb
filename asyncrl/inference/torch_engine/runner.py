"""The model: loading it, prefilling prompts, decoding one token per slot."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.config.model import ModelConfig
from asyncrl.config.paths import check_path
from asyncrl.config.rollout import TorchEngineConfig
from asyncrl.errors import ConfigError, GenerationError, explain
from asyncrl.inference.engines import unsupported_by_torch
from asyncrl.inference.torch_engine.cache import ATTENTION_NAME, PromptCache, SlotCache, slot_attention
from asyncrl.inference.torch_engine.sampling import log_softmax
from asyncrl.inference.torch_engine.slots import Moves
from asyncrl.kernels.images import ImageInputs
from asyncrl.kernels.routers import RouterTaps
from asyncrl.types import (
    HOW_TO_TIE,
    UNTIED,
    ModelFacts,
    auto_class,
    decoder_of,
    drop_towers,
    misfit,
    settle,
)
from asyncrl.types.images import FIRST_ID

PREFILL_TOKENS = 1024
"""Tokens of one prefill pass, padding included: bounds its memory and how long it delays running requests."""


def load_model(
    config: ModelConfig, device: torch.device, *, max_model_len: int | None = None, real_weights: bool, seed: int
) -> Any:
    """Loads the model in `config.inference_dtype` on `device`, with slot attention and without gradients.

    Without `real_weights` only the config is read and the parameters are random (from `seed`). Computed buffers, such
    as rotary frequencies, are correct either way. `max_model_len`: see `types.settle`.

    Raises GenerationError: the files contradict the config.
    """
    from transformers import AttentionInterface, AutoConfig

    check_path(config.path)
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    hub = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    kind = {"dtype": getattr(torch, config.inference_dtype), "attn_implementation": ATTENTION_NAME}
    path = str(Path(config.path).expanduser()) if Path(config.path).expanduser().exists() else config.path
    architecture = AutoConfig.from_pretrained(path, **hub)
    settle(architecture, max_model_len)
    model: Any
    kinds = auto_class(architecture)
    if real_weights or config.image_directory is not None:  # no publish has the encoder of images
        model, loaded = kinds.from_pretrained(path, config=architecture, output_loading_info=True, **hub, **kind)
        if why := misfit(model, loaded):
            do = HOW_TO_TIE if why == UNTIED else "name a whole model: save it again with all of its tensors"
            raise GenerationError(explain(f"serve {path}", why, do))
    else:
        # Random weights must not change the process's own random state.
        with torch.random.fork_rng(), device:
            torch.manual_seed(seed)
            remote = {"trust_remote_code": config.trust_remote_code}
            model = kinds.from_config(architecture, **remote, **kind)
    towers = drop_towers(model)
    model = model.to(device).eval().requires_grad_(False)
    model.image_inputs = None
    if config.image_directory is not None:
        model.image_inputs = ImageInputs(model, config, towers)
        model.image_inputs.to(device, model.dtype)
    return model


def check_architecture(config: Any, max_model_len: int) -> None:
    """Raises GenerationError if the slot loop cannot run the model's attention or positions."""
    facts = ModelFacts.of_config(config.name_or_path, config.to_dict())
    asked = f"model {config.model_type} in the torch engine with max_model_len={max_model_len}"
    if problems := unsupported_by_torch(facts, max_model_len):
        do = "use rollout.engine=vllm, or a max_model_len within the window"
        raise GenerationError(explain(asked, ", ".join(problems), do))
    positions = facts.max_position_embeddings
    if positions is not None and positions < max_model_len:
        do = f"set rollout.torch.max_model_len to at most {positions}"
        raise GenerationError(explain(asked, f"the model has {positions} positions", do))


class Prefill:
    """Progress of a prefill. `prompts`: token ids [p] int32 each, none empty."""

    def __init__(self, config: Any, prompts: list[np.ndarray]) -> None:
        """`config`: of the Hugging Face model."""
        self.prompts = prompts
        self.width = max(map(len, prompts))
        self.done = 0
        self.has_images = any((prompt >= FIRST_ID).any() for prompt in prompts)
        self.cache = PromptCache(config, len(prompts), self.width)

    @property
    def finished(self) -> bool:
        return self.done == self.width


class ModelRunner:
    """Forward passes over slots `[0, n)`. Used by one thread, under `torch.inference_mode`.

    Attributes:
        needs_equal_lengths: recurrent layers would read what fills up shorter prompts.
    """

    def __init__(self, model: Any, settings: TorchEngineConfig, *, prefill_tokens: int = PREFILL_TOKENS) -> None:
        check_architecture(model.config, settings.context_tokens)
        if not hasattr(decoder_of(model), "layers"):
            found, do = "it keeps its state otherwise than layer by layer", "use rollout.engine=vllm"
            raise GenerationError(explain(f"model {model.config.model_type} in the torch engine", found, do))
        self.model = model
        self.prefill_tokens = prefill_tokens
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._dtype, self._device = model.dtype, model.device
        self._cache = SlotCache(model.config, settings.num_slots, settings.context_tokens)
        self.needs_equal_lengths = any(hasattr(layer, "conv_states") for layer in self._cache.layers)
        takes = inspect.signature(decoder_of(model).forward).parameters
        self._cache_name = "cache_params" if "cache_params" in takes else "past_key_values"
        self._positions = torch.arange(settings.context_tokens, device=self._device)
        self._rows = torch.arange(settings.num_slots, device=self._device)
        self._visible = torch.zeros((), dtype=self._dtype, device=self._device)
        self._hidden = torch.full((), float("-inf"), dtype=self._dtype, device=self._device)
        self._released: dict[str, ReleasedMemory] = {}
        self._taps = RouterTaps(model)
        self.expert_row = (len(self._taps.layers), self._taps.per_token) if self._taps.layers else None

    def decode_and_record(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """Like `decode`, and the experts that the routers chose, [n, *expert_row] int16."""
        with self._taps.recorded() as choices:
            logits = self.decode(tokens, lengths)
        return logits, torch.stack([c.experts for c in choices], 1).cpu().numpy().astype(np.int16)

    def decode(self, tokens: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """Feeds one token per slot, at position `lengths[i]`; returns logits [n, vocabulary] float32.

        Args:
            tokens, lengths: [n] int64.
        """
        positions = torch.from_numpy(lengths).to(self._device)
        kv_len = int(lengths.max()) + 1
        self._cache.aim(self._rows[: len(tokens)], positions, kv_len)
        output = self.model(
            input_ids=torch.from_numpy(tokens).to(self._device)[:, None],
            position_ids=(positions + self._cache.shifts[: len(tokens)].to(self._device))[:, None],
            attention_mask=self._mask(positions, kv_len)[:, None, None],
            use_cache=False,
            **{self._cache_name: self._cache},
        )
        return output.logits[:, -1].float()

    def begin(self, prompts: list[np.ndarray]) -> Prefill:
        """A prefill of these prompts; of equal lengths if the model `needs_equal_lengths`."""
        return Prefill(self.model.config, prompts)

    def prefill(self, prefill: Prefill) -> None:
        """Computes the next chunk of every prompt: at most `prefill_tokens` tokens, padding included."""
        self._feed(prefill, decoder_of(self.model))

    def score(
        self, sequences: list[np.ndarray], starts: list[int], tops: list[int]
    ) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Log-probabilities [len - start] float32, at temperature 1, of each sequence's tokens from `start` on. With
        `top` > 0 also the likeliest tokens of each position, see `SamplingParams.score_top`.

        Args:
            sequences: token ids [len] int32 each, len >= 2.
            starts: 1 <= start < len.
            tops: at most the vocabulary size.
        """
        prefill = self.begin([sequence[:-1] for sequence in sequences])
        found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in sequences]
        while not prefill.finished:
            begun, first = prefill.done, max(prefill.done, min(starts) - 1)
            stop = min(begun + self._chunk_of(prefill), prefill.width)
            if first >= stop:  # nothing of this chunk is scored: skip the output layer
                self._feed(prefill, decoder_of(self.model))
                continue
            kept = torch.arange(first - begun, stop - begun, device=self._device)
            logits = self._feed(prefill, self.model, logits_to_keep=kept).logits
            for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
                # The logits at position p predict the token at p + 1.
                low, high = max(first, start - 1), min(stop, len(sequence) - 1)
                if low < high:
                    targets = torch.from_numpy(sequence[low + 1 : high + 1].astype(np.int64)).to(self._device)
                    targets = targets if self.model.image_inputs is None else self.model.image_inputs.plain(targets)
                    logprobs = log_softmax(logits[row, low - first : high - first].float())
                    found[row].append((logprobs.gather(1, targets[:, None])[:, 0], *logprobs.topk(tops[row])))
        return [_scored(parts) for parts in found]

    def _chunk_of(self, prefill: Prefill) -> int:
        """Tokens per prompt in one pass: all of them where layers are recurrent, which not all go on from a state with
        several tokens (Mamba-1 does not), and where prompts have images."""
        whole = self.needs_equal_lengths or prefill.has_images
        return prefill.width if whole else max(1, self.prefill_tokens // len(prefill.prompts))

    def _feed(self, prefill: Prefill, model: Any, **options: Any) -> Any:
        """Runs `model` on the next chunk of every prompt."""
        size = self._chunk_of(prefill)
        start, stop = prefill.done, min(prefill.done + size, prefill.width)
        # Shorter prompts are padded with token 0; no later token of theirs can see the padding.
        ids = np.zeros((len(prefill.prompts), stop - start), np.int64)
        for row, prompt in enumerate(prefill.prompts):
            piece = prompt[start:stop]
            ids[row, : len(piece)] = piece
        positions = self._positions[start:stop]
        prefill.cache.aim(start)
        tokens = torch.from_numpy(ids).to(self._device)
        read = partial(model, input_ids=tokens)
        if prefill.has_images:
            images: ImageInputs = self.model.image_inputs
            read = partial(images.read, self.model, tokens, logits=model is self.model)
            for row, prompt in enumerate(prefill.prompts):
                own = torch.from_numpy(prompt.astype(np.int64))[None].to(self._device)
                prefill.cache.shifts[row] = images.shifts(self.model, own)[0]
        output = read(
            position_ids=positions[None],
            attention_mask=self._mask(positions, stop)[None, None],
            use_cache=False,
            **{self._cache_name: prefill.cache},
            **options,
        )
        prefill.done = stop
        return output

    def clear(self, rows: list[int]) -> None:
        """Slots of prompts of one token, for which nothing is prefilled."""
        self._cache.clear(torch.tensor(rows, dtype=torch.int64, device=self._device))

    def seat(self, prefill: Prefill, prompts: list[int], rows: list[int]) -> None:
        """Copies prompt `prompts[i]` of a finished prefill to slot `rows[i]`."""
        on = self._device
        self._cache.fill(torch.tensor(rows, device=on), prefill.cache, torch.tensor(prompts, device=on))

    def move(self, moves: Moves) -> None:
        self._cache.move(moves)

    def release(self) -> None:
        """Releases the memory of slots and parameters, which are 0 afterwards; no slot may be in use. Computed buffers,
        such as rotary frequencies, stay, because no publish contains them."""
        self._released = {
            "kv_cache": ReleasedMemory(self._cache.tensors),
            "weights": ReleasedMemory(self.model.parameters()),
        }

    def restore(self, parts: Collection[str]) -> None:
        """Reallocates these parts ("weights", "kv_cache"); parts that were not released are unchanged."""
        for part in parts:
            if (released := self._released.pop(part, None)) is not None:
                released.restore()

    def warm_up(self) -> None:
        """Runs one pass of each kind, which allocates the cache: a model that does not fit fails here. Raises
        ConfigError: images are read otherwise than by the model's own class."""
        if self.model.image_inputs is not None:
            self.model.image_inputs.prove(self.model, self._read_whole, ATTENTION_NAME)
        prefill = self.begin([np.zeros(1, np.int32)])
        self.decode(np.zeros(1, np.int64), np.zeros(1, np.int64))
        self.prefill(prefill)
        self.seat(prefill, [0], [0])

    def _read_whole(self, ids: torch.Tensor) -> torch.Tensor:
        """[n, hidden size]: the decoder's last hidden states for token ids [n]."""
        if len(ids) > len(self._positions):
            found = f"a small image takes {len(ids)} tokens, and a sequence may have {len(self._positions)}"
            raise ConfigError(explain("read images in the torch engine", found, "raise rollout.torch.max_model_len"))
        return self._feed(self.begin([ids.cpu().numpy()]), decoder_of(self.model)).last_hidden_state[0]

    def _mask(self, positions: torch.Tensor, kv_len: int) -> torch.Tensor:
        """[m, kv_len] additive causal mask: the token at `positions[i]` ([m] int64) sees positions <= its own."""
        return torch.where(self._positions[:kv_len] <= positions[:, None], self._visible, self._hidden)


def _scored(parts: list[tuple[torch.Tensor, ...]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Joins the parts of one sequence: (log-probabilities, log-probabilities of the likeliest tokens, their ids)."""
    logprobs, top_logprobs, top_ids = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
    if not top_ids.shape[1]:
        return logprobs, {}
    return logprobs, {"top_ids": top_ids.astype(np.int32), "top_logprobs": top_logprobs}


class ReleasedMemory:
    """The storages of tensors whose memory was released. The tensors and their views, such as the targets of a publish,
    stay valid and can be used again after `restore`.

    On a GPU the storage is resized to 0 until then. On a CPU it keeps its addresses and gives up its whole pages;
    partial pages at both ends stay.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Releases the memory. A storage shared by tied tensors counts once.

        Raises GenerationError: the system cannot take pages back.
        """
        found = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [s for s in found.values() if s.nbytes()]
        self._bytes = [storage.nbytes() for storage in self._storages]
        for storage in self._storages:
            if storage.device.type == "cpu":
                _give_pages(storage.data_ptr(), storage.nbytes())
            else:
                storage.resize_(0)
        if any(storage.device.type == "cuda" for storage in self._storages):
            torch.cuda.empty_cache()

    @property
    def nbytes(self) -> int:
        """Bytes that were released."""
        return sum(self._bytes)

    def restore(self) -> None:
        """Reallocates the memory, filled with zeros."""
        for storage, nbytes in zip(self._storages, self._bytes, strict=True):
            if storage.device.type != "cpu":
                storage.resize_(nbytes)
            storage.fill_(0)


def _give_pages(address: int, nbytes: int) -> None:
    """Returns the whole pages of this memory to the system; they read as 0 afterwards. Shrinking the storage is
    impossible: torch forbids it once NumPy has seen the storage, as in a transfer."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size <= 0:
        return
    libc, advice = ctypes.CDLL(None, use_errno=True), getattr(mmap, "MADV_DONTNEED", None)
    if advice is None or libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice) != 0:
        found = "this system cannot take pages back" if advice is None else os.strerror(ctypes.get_errno())
        asked = f"sleep of the torch engine: {size} bytes back to the system"
        raise GenerationError(explain(asked, found, "set placement=separate"))
