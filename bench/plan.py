"""Which cases are measured: the short suite of `make bench`, and the full one.

The short suite has AdamW and SGD-momentum in float32 on all its models. Inductor takes
a minute of compiling where fuseopt takes seconds, so that in the short suite it runs on
the models of FEW only; a contender that a case leaves out is named in its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.contenders import CONTENDERS
from bench.models import SMALL
from bench.optimizers import RECIPES

#: of up to 140M elements, so that a step of eager is a second at most
MODELS = (
    "albert-base resnet18 distilbert visformer_small t5-small mixer_b16_224 gpt2 "
    "vit_base_patch16_224 deit_small_patch16_224 resnet50 repvgg_a2 "
    "mobilenetv3_large_100 beit_base_patch16_224 bert-base efficientnet_b0 "
    "wav2vec2-base nfnet_l0 volo_d1_224 crossvit_9_240 regnety_032 pvt_v2_b2 "
    "densenet121"
).split()
#: where bfloat16, the other optimizers and Inductor are measured
FEW = {
    "short": ("albert-base", "resnet18"),
    "full": (
        "albert-base resnet18 distilbert t5-small vit_base_patch16_224 resnet50 "
        "mobilenetv3_large_100 pvt_v2_b2"
    ).split(),
}
#: whose tails are measured
TAILS = ("resnet50", "bert-base", "gpt2")
#: contenders that Inductor compiles
SLOW_TO_COMPILE = ("inductor", "inductor-graphs", "heavyball", "torchao")
#: loops that Inductor compiles in the short suite
LOOPS = ("Lion", "LAMB")
#: the full suite's models beside MODELS: many tensors, or many elements
MORE = (
    "tf_efficientnetv2_xl cait_m36_384 resnet152 twins_pcpvt_base whisper-small "
    "bart-base roberta-base convnext_base"
).split()
#: on a GPU, where they fit and what is large is what matters
LARGE = ("gpt2-xl", "llama-1b")
#: built by their library; its own parameters, ties and layouts
REAL = ("transformers:gpt2", "transformers:bert")

SUITES = ("short", "full")
PARAMS = {"short": (50, 300, 1000), "full": (50, 100, 300, 600, 1000, 1156)}
#: parameters up to which Inductor's first step is measured; it takes minutes beyond
INDUCTOR_PARAMS = {"short": 50, "full": 300}


@dataclass(frozen=True)
class StepCase:
    """A step of one optimizer over one model. `left_out`: contenders by reason."""

    model: str
    optimizer: str
    dtype: str
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"step/{self.model}/{self.optimizer}/{self.dtype}"


@dataclass(frozen=True)
class FirstCase:
    """A first AdamW step of a model, from cold caches, in a process of its own.

    Of small parameters (`300x8`) then once more, with the caches that it filled.
    """

    way: str
    model: str

    @property
    def small(self) -> bool:
        return SMALL.fullmatch(self.model) is not None

    @property
    def name(self) -> str:
        what = self.model.partition("x")[0] if self.small else self.model
        return f"first/{what}/{self.way}"


@dataclass(frozen=True)
class HostCase:
    """Calls over so many small parameters."""

    params: int

    @property
    def name(self) -> str:
        return f"host/{self.params}"


@dataclass(frozen=True)
class TrainingCase:
    """Whole training steps of a model. `whole`: and the step compiled as one."""

    model: str
    whole: bool

    @property
    def name(self) -> str:
        return f"training/{self.model}"


@dataclass(frozen=True)
class TailCase:
    """The tail of a training step over a model's shapes."""

    model: str

    @property
    def name(self) -> str:
        return f"tail/{self.model}"


@dataclass(frozen=True)
class ShardCase:
    """A step and a clip of so many DTensors. `without`: ways that do not run."""

    params: int
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"shards/{self.params}"


Case = StepCase | FirstCase | HostCase | TrainingCase | TailCase | ShardCase


def step(model: str, optimizer: str, dtype: str, suite: str) -> StepCase:
    """Return one case, with what Inductor compiles where the suite runs it."""
    few = model in FEW[suite] and dtype == "float32"
    if suite == "full":
        wanted = few or optimizer in ("AdamW", "SGD")
    else:
        wanted = few and optimizer in ("AdamW", "SGD")
        wanted |= few and model == FEW[suite][0] and optimizer in LOOPS
    why = f"the {suite} suite runs it on few models, for its compile time"
    skipped = () if wanted else SLOW_TO_COMPILE
    return StepCase(model, optimizer, dtype, tuple((name, why) for name in skipped))


def steps(suite: str, device: str = "cpu") -> list[StepCase]:
    """Return the step cases, the most telling first."""
    return list(dict.fromkeys(_steps(suite, device)))


def _steps(suite: str, device: str) -> Iterator[StepCase]:
    models = [*MODELS, *REAL]
    if suite == "full":
        models += MORE
    if device != "cpu":
        models += LARGE
    for optimizer in ("AdamW", "SGD"):
        for model in models:
            yield step(model, optimizer, "float32", suite)
    for dtype in ("float32", "bfloat16"):
        for optimizer in RECIPES:
            for model in FEW[suite]:
                yield step(model, optimizer, dtype, suite)


def contenders(case: StepCase) -> list[str]:
    """Return the names of those that a case lets run, in their order."""
    return [name for name in CONTENDERS if name not in dict(case.left_out)]


def first_steps(suite: str) -> Iterator[FirstCase]:
    """Return the first steps: fuseopt both ways, and Inductor where it ends; of models
    all three, so that they compare like with like.
    """
    for params in PARAMS[suite]:
        for way in ("fuseopt.compile", "backend", "inductor"):
            if way == "inductor" and params > INDUCTOR_PARAMS[suite]:
                continue
            yield FirstCase(way, f"{params}x8")
    for model in FEW[suite] if suite == "short" else (*MODELS, *MORE):
        for way in ("fuseopt.compile", "backend", "inductor"):
            yield FirstCase(way, model)


def hosts(suite: str) -> list[HostCase]:
    """Return the host cases."""
    return [
        HostCase(params) for params in ((300,) if suite == "short" else (300, 1000))
    ]


def trainings(suite: str) -> list[TrainingCase]:
    """Return the training cases."""
    from bench.training import MODELS as TRAINED

    names = list(TRAINED) if suite == "full" else list(TRAINED)[:1]
    return [TrainingCase(name, whole=suite == "full") for name in names]


def tails(device: str) -> list[TailCase]:
    """Return the tails; those of a GPU are in bench/gpu."""
    return [TailCase(name) for name in TAILS] if device == "cpu" else []


def shards(device: str) -> list[ShardCase]:
    """Return the cases of DTensors. Inductor takes minutes for 60 of them."""
    if device != "cpu":
        return []
    return [ShardCase(60), ShardCase(300, ("inductor",))]
