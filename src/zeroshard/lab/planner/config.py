"""Settings of `zeroshard plan`, checked before torch is imported."""

from __future__ import annotations

import warnings
from typing import Literal, Self

from pydantic import Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.lab.planner.price import parse_prices
from zeroshard.lab.predict.hardware import find_device, find_link
from zeroshard.settings import rules
from zeroshard.settings.base import Count
from zeroshard.settings.engine import EngineConfig
from zeroshard.settings.frozen_base import check_base
from zeroshard.settings.sizes import parse_size
from zeroshard.train.config.model_section import ModelTables
from zeroshard.train.config.with_strategy import check_offload

Question = Literal["none", "fewest-gpus", "longest-sequence"]


# pydantic's base class has a deprecated method of that name, replaced by `model_dump_json`.
warnings.filterwarnings("ignore", message='Field name "json" in "PlanConfig" shadows', category=UserWarning)


class PlanConfig(EngineConfig, ModelTables):
    """Settings of a plan: the training job, and the hardware to plan it for."""

    gpus: int = Field(1, ge=1, le=999_999, description="GPUs, one rank each.")
    gpu: str = Field(
        "h100-80gb",
        min_length=1,
        description="Device by name, or a file of `zeroshard bench device`; several, as a100-80gb,l40s, are compared.",
    )
    gpus_per_node: int = Field(8, ge=1, description="GPUs of a full node.")
    network: str = Field(
        "400Gbit/s",
        min_length=1,
        description="Network of each GPU to other nodes, its share of the node's cards: a bandwidth with its unit, or "
        "a link's name.",
    )
    within_node: str = Field(
        "", description="Network of each GPU within a node, as --network; empty: the GPU's own links."
    )

    host_memory: str = Field(
        "",
        description="Memory of a node's host, as 512GiB, for what leaves its GPUs; empty: as `zeroshard bench device` "
        "found it, else unknown.",
    )
    seq_len: int = Field(0, ge=0, description="Tokens of a sequence; 0: the longest of the model.")
    global_batch: int = Field(
        0, ge=0, description="Sequences of a step over all GPUs, by accumulation; 0: one micro-batch of each."
    )
    micro_batch: int = Field(0, ge=0, description="Sequences of a GPU in one forward; 0: as many as fit.")
    stage: Literal["all", "0", "1", "2", "3"] = Field("all", description="ZeRO stage.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="Type of forward and backward.")
    optimizer: str = Field(
        "adamw",
        min_length=1,
        description="Optimizer, as torch names it: adamw, sgd, muon, adafactor, ...; or adamw8bit, flash-adamw.",
    )
    impl: Literal["auto", "eager", "compile", "kernels"] = Field(
        "auto",
        description="How a GPU computes: eager, torch.compile of the model, or fused kernels; auto: as a run there "
        "does by default, compiled but with reproducible or tiles.",
    )
    attention: Literal["auto", "flash-1", "flash-2", "flash-3", "cudnn"] = Field(
        "auto", description="Fused attention that a GPU runs; auto: as torch chooses there."
    )
    document_mask: bool = Field(False, description="Attention stays inside a document, which costs a mask.")
    autocast: bool = Field(False, description="Weights and gradients in fp32, cast to --dtype around forward.")
    price: str = Field("", description="Dollars an hour of one GPU, as 2.5/h; of several kinds one each: 2.5/h,1.2/h.")
    tokens: Count = Field(0, ge=0, description="Tokens to train on, as 10B: the plan says how long, and for how much.")
    headroom: float = Field(0.02, ge=0, lt=1, description="Share of memory that must stay free.")

    json: bool = Field(False, description="Print JSON.")  # ty: ignore[incompatible-attribute-override]
    explain: bool = Field(
        False, description="Print what --stage, else the row advised, sends, and each figure's source."
    )
    fit: bool = Field(
        False,
        description="If nothing fits, pull levers that change nothing that is trained, the cheapest in time first: "
        "recomputation, inputs on the host, tiles, shared sequences, state on the host.",
    )
    ask: Question = Field("none", description="Answer this question instead of printing the table.")

    @model_validator(mode="after")
    def _hardware_is_known(self) -> Self:
        for name in self.gpu_names:
            find_device(name)
        parse_prices(self.price, len(self.gpu_names))
        self._asks_one_thing()
        self._asks_of_one_size()
        find_link(self.network)
        if self.local_steps.on:
            rules.check_local_steps("local_steps.every", self.local_steps.every, self.shard_size)
        if self.local_steps.on and (self.explain or self.ask != "none"):
            flag = "explain" if self.explain else "ask"
            what = "answers of steps alone, and with local_steps.every some of them have an outer step"
            raise UserError(flag, what, "leave one of the two out")
        if self.wire.given and self.stage == "0":
            rules.check_wire(f"wire.{self.wire.given}", getattr(self.wire, self.wire.given), 0)
        if self.wire.node_size and self.ask == "fewest-gpus":
            what = "fewest-gpus changes the GPUs that it shares out"
            raise UserError("wire.node_size", what, "leave one of the two out")
        check_offload(self.offload, "zero3", local_steps=self.local_steps.on)
        check_base(self)
        self._copies_what_is_sharded()
        if self.reproducible and self.ask == "fewest-gpus":
            what = "fewest-gpus looks at ways to run that have other bits"
            raise UserError("reproducible", what, "leave one of the two out")
        if self.sequence_parallel > 1 and self.ask == "fewest-gpus":
            what = "fewest-gpus looks at other numbers of GPUs"
            raise UserError("sequence_parallel", what, "leave one of the two out")
        if self.host_memory:
            parse_size("host_memory", self.host_memory)
        if self.within_node:
            find_link(self.within_node, "within_node")
        return self

    def _copies_what_is_sharded(self) -> None:
        """Raise UserError for a second copy of weights if none are sharded, or the question varies the world size."""
        if not self.node_copy:
            return
        if self.stage not in ("3", "all"):
            who, todo = f"stage {self.stage}", "leave it out, or give --stage 3"
            rules.check_second_copy("node_copy", self.node_copy, who, shards=False, reshards=True, todo=todo)
        if self.ask == "fewest-gpus":
            raise UserError("node_copy", "fewest-gpus changes the GPUs that it shares out", "leave one of the two out")

    def _asks_one_thing(self) -> None:
        """Raise UserError for settings that do not belong to the question that is asked."""
        asked = "ask" if self.ask != "none" else "explain" if self.explain else ""
        if asked and len(self.gpu_names) > 1:
            raise UserError("gpu", f"{asked} is of one device, and {len(self.gpu_names)} are named", "name one")
        if self.fit and (asked or len(self.gpu_names) > 1):
            what = f"it is of the table, which {asked} takes the place of" if asked else "it is of one device"
            raise UserError("fit", what, "leave one of the two out" if asked else "name one --gpu")
        if asked and (self.price or self.tokens):
            name = "price" if self.price else "tokens"
            raise UserError(
                name, f"it belongs to the table, which {asked} takes the place of", "leave one of the two out"
            )

    def _asks_of_one_size(self) -> None:
        """Raise UserError for sizes that the question itself varies or does not use: they would change nothing."""
        ask = self.ask
        given = {
            "global_batch": ask != "none" and "looks at one micro-batch of each GPU",
            "seq_len": ask == "longest-sequence" and "takes the longest that fits",
            "shard_size": ask != "none" and "shares out training state over all GPUs",
        }
        name, looks = next(((name, looks) for name, looks in given.items() if looks and getattr(self, name)), ("", ""))
        if name:
            what = f"{getattr(self, name)} would change nothing: {ask} {looks}"
            raise UserError(name, what, "leave one of the two out")

    @property
    def gpu_names(self) -> list[str]:
        """The devices to plan for."""
        return [name.strip() for name in self.gpu.split(",")]
