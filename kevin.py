"""Kevin: multi-turn reinforcement learning for CUDA kernels, in one file.

Re-implements "Kevin: Multi-Turn RL for Generating CUDA Kernels" (arXiv 2507.11948). A language
model is shown a PyTorch program and writes a faster kernel for it. A judge compiles, checks and
times the kernel; the model sees the feedback and tries again. Every turn is one training sample of
GRPO, and its reward is the discounted sum of the scores from that turn on. Read from top to bottom:
sections 1 to 7 need only torch and end at the reward, sections 8 to 12 are the trainer.

    python kevin.py train --tiny                      the whole loop on a CPU, in minutes
    python kevin.py train                             QwQ-32B (several GPUs: accelerate launch)
    python kevin.py eval --turns 8 --k 16             parallel trajectories of serial turns
    python kevin.py score --task ID --candidate FILE  the judge's verdict on a kernel
    python kevin.py audit RUN                         recomputes a run's scores and advantages
    python kevin.py show RUN [STEP/TASK/INDEX]        a run's trajectories, or one of them to read
    python kevin.py report RUN...                     one page to read runs in a browser
    python kevin.py tasks show|check|make             a program, the admission gate, new tasks

Where the paper is in this file
    3.1   tasks: a reference program and its inputs         load_tasks
    4.1   prompt, history without chains of thought         build_prompt
    4.1   thought, kernel and summary of an answer          parse_response
    D     feedback to the model                             feedback
    6.2   reward hacks: what a kernel's Python may not do   find_hacks
    6.2   reward hacks: what its machine code may not call  foreign_symbols
    3.1   compile, check, time                              Judge
    3.2   score of one kernel                               kernel_score
    4.3   return of a turn                                  discounted_returns
    4.2   advantage in the group of m * n samples           group_advantages
    3.3   token log-probabilities, adapter                  Policy
    C     sampling                                          Engine
    4     turns of a trajectory                             rollout
    3.3   GRPO loss                                         policy_loss
    6.1   health: Not Okay ratio, answers cut               step_metrics
    4.4   the training run                                  train
    5     best@k and avg@k                                  evaluate
Choices are marked PAPER (taken from it), DEPARTS (we differ, and why) or GUESS (it is silent).

Notation: m trajectories of a task, n turns of each, N samples of one update; S, R, A are score,
return and advantage of a turn; (T,) (V,) (B,) are tokens, vocabulary, batch rows; times end in _s
or _ms. Not covered: full fine-tuning, sharded models. The sandbox's limits: see the README.
"""

# ---- 1. Imports and constants --------------------------------------------------------------------

import argparse
import ast
import builtins
import collections
import contextlib
import ctypes
import difflib
import errno
import fcntl
import functools
import gc
import hashlib
import html
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import itertools
import json
import math
import mmap
import os
import platform
import random
import re
import resource
import select
import shutil
import signal
import socket
import stat
import statistics
import string
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import types
import unicodedata
import urllib.parse
import zlib
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.utils._python_dispatch
import torch.utils.checkpoint
from torch import nn


class Lazy:
    """A module, imported when it is first used: it takes seconds, and the zygote needs none."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, attribute: str):
        return getattr(importlib.import_module(self.name), attribute)


accelerate, huggingface_hub, peft = Lazy("accelerate"), Lazy("huggingface_hub"), Lazy("peft")
tokenizers, transformers = Lazy("tokenizers"), Lazy("transformers")


class UserError(Exception):
    """Bad input from the person at the keyboard: one line, exit status 2."""


class JudgeFault(Exception):
    """The judge itself failed (disk, memory, zygote): never a score of zero for the candidate."""


class Stopwatch:
    """Seconds spent in named phases; an inner one stops the outer, so that the sum is the time."""

    def __init__(self):
        self.seconds, self.phases = collections.Counter(), ["other"]
        self.since = time.perf_counter()

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds[self.phases[-1]] += now - self.since
        self.since = now

    @contextlib.contextmanager
    def __call__(self, phase: str):
        """Counts what happens within as that phase."""
        self._count()
        self.phases.append(phase)
        try:
            yield
        finally:
            self._count()
            self.phases.pop()

    def lap(self) -> dict[str, float]:
        """Seconds of every phase since the last lap."""
        self._count()
        seconds, self.seconds = self.seconds, collections.Counter()
        return dict(seconds)


CLOCK = Stopwatch()


# ---- 2. Configuration ----------------------------------------------------------------------------


def arg(default, text: str):
    """A configuration field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """Training and evaluation; every default is the paper's unless the help says otherwise."""

    # tasks and model
    tasks: str = arg("tasks.jsonl", "task file (JSON lines) or folder of KernelBench programs")
    model: str = arg("Qwen/QwQ-32B", "base model: a Hub id or a folder")
    random_weights: bool = arg(False, "--model's shape with random numbers, to measure a machine")
    adapter: str = arg("", "adapter to evaluate, checkpoints/step-N; empty: the base model")
    api_base: str = arg("", "evaluate --model on this OpenAI-compatible server instead")
    tiny: bool = arg(False, "a model of a million weights and three small tasks, on the CPU")
    # rollout
    tasks_per_step: int = arg(8, "tasks in a step")
    trajectories: int = arg(16, "parallel trajectories of a task, m in the paper")
    turns: int = arg(4, "refinement turns of a trajectory, n; 1 is the single-turn baseline")
    beam: int = arg(0, "evaluation: after each turn, this many trajectories live on in copies")
    compile_baseline: bool = arg(False, "evaluation: compare with torch.compile too")
    temperature: float = arg(0.9, "sampling temperature")
    max_prompt_tokens: int = arg(8192, "prompt limit, kept by dropping whole oldest turns")
    max_new_tokens: int = arg(16384, "answer limit")
    late_new_tokens: int = arg(22528, "answer limit from --late-step on")
    late_step: int = arg(30, "step from which --late-new-tokens holds")
    # reward
    correct_weight: float = arg(0.3, "score of a correct kernel, to which its speedup is added")
    gamma: float = arg(0.4, "discount of later turns' scores, in [0, 1]")
    aggregate: Literal["sum", "max"] = arg("sum", "return: sum or maximum of the discounted scores")
    scale: Literal["none", "group", "batch"] = arg("none", "divide advantages by a deviation")
    # optimiser
    steps: int = arg(40, "training steps (batches of rollouts)")
    updates_per_step: int = arg(2, "gradient steps on each batch: one on-policy, then off-policy")
    learning_rate: float = arg(2e-5, "after warm-up; the paper's 2e-6 is likely for all weights")
    warmup_updates: int = arg(8, "gradient steps of linear warm-up")
    clip_low: float = arg(0.2, "ratio clip below 1")
    clip_high: float = arg(0.28, "ratio clip above 1")
    stop_on_junk: float = arg(0.0, "end the run at this share of junk answers; 0: never")
    max_grad_norm: float = arg(0.05, "gradient-norm clip")
    kl: float = arg(0.0, "weight of the KL term to the model without its adapter")
    length_normalizer: int = arg(16384, "constant by which token losses are divided")
    lora_rank: int = arg(16, "rank of the adapters on all linear layers; the paper names no LoRA")
    lora_alpha: int = arg(32, "LoRA scale times rank")
    # engine, judge, run
    max_batch: int = arg(64, "sequences decoded together, as far as their keys and values fit")
    kv_gib: float = arg(0.0, "GPU memory for keys and values; 0: what an update leaves free")
    build_jobs: int = arg(0, "kernels compiled at once; 0 is the number of cores")
    cache: str = arg("~/.cache/kevin", "folder of precompiled headers and built kernels")
    unsafe: bool = arg(False, "run candidates although this machine cannot contain them")
    out: str = arg("", "run folder; empty is runs/COMMAND-DATE")
    resume: str = arg("", "run folder to go on with, under its own configuration")
    seed: int = arg(0, "seed of task order and sampling")

    def __post_init__(self):
        positive = """tasks_per_step trajectories turns steps updates_per_step max_prompt_tokens
            max_new_tokens late_new_tokens lora_rank lora_alpha length_normalizer max_batch
            temperature learning_rate max_grad_norm""".split()
        for name in [*positive, *"""beam build_jobs kv_gib warmup_updates stop_on_junk kl clip_low
                clip_high correct_weight late_step""".split()]:
            if not getattr(self, name) >= 0 or name in positive and not getattr(self, name):
                kind = "positive" if name in positive else "at least 0"
                raise UserError(f"--{name.replace('_', '-')} must be {kind}")
        if self.beam > self.trajectories or self.max_batch > 2048:
            raise UserError("--beam may be at most --trajectories, and --max-batch 2048")
        if not 0.0 <= self.gamma <= 1.0:
            raise UserError(f"--gamma must lie in [0, 1], got {self.gamma:g}")


# ---- 3. Data types and tasks (paper 3.1, A) ------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One problem: a reference program that the candidate must agree with and beat."""

    id: str  # "L1-003", "N-042"
    level: int | str  # 1, 2, "new" or "tiny"
    name: str
    ops: str  # operator sequence
    code: str  # defines Model, get_inputs, get_init_inputs; tensors are on the default device
    note: str = ""  # what differs from KernelBench, and why
    answers: tuple = ()  # of tiny tasks: example answers {"weight", "text"} for the warm-up


OUTCOMES = {  # what a verdict can be, and what the model is told about it
    "no_code": "There was no fenced program after your reasoning, or it was too long.",
    "hack": "Your program broke a rule ({rule}): {message}",
    "compile_error": "Your program did not compile:\n{message}",
    "runtime_error": "Your program compiled but failed when it ran: {message}",
    "incorrect": "Your program ran but its result is wrong: {message}",
    "suspicious": "Your program's time cannot be trusted ({rule}): {message}",
    "correct": "Your program is correct: {runtime_ms:.3g} ms against PyTorch's "
               "{baseline_ms:.3g} ms, a speedup of {speedup:.2f}x. Make it faster.",
    "judge_error": "The evaluation itself failed; this says nothing about your program."}


@dataclass(frozen=True)
class Verdict:
    """What the judge found. Only `correct` scores; a judge_error is not the candidate's doing."""

    outcome: str  # one of OUTCOMES
    rule: str = ""  # the rule that was broken, for hack and suspicious
    message: str = ""  # for the model and the auditor
    runtime_ms: float | None = None  # median of one call
    baseline_ms: float | None = None  # the same of PyTorch eager
    speedup: float = 0.0  # baseline_ms / runtime_ms of a correct kernel, else 0
    error: float | None = None  # rms(out - reference) / std(reference), worst of the trials
    reference: str = "float64"  # or "float32", where float64 does not fit
    device: str = ""
    seeds: tuple[int, ...] = ()  # (weights, inputs) of every check, drawn for this candidate


@dataclass(frozen=True)
class Turn:
    """One sample: a prompt, the answer to it, and what became of the answer."""

    task: str
    step: int
    trajectory: int
    turn: int
    prompt: str
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]
    sampling_logprobs: list[float]
    finish_reason: str  # "stop" or "length"
    kernel: str | None
    summary: str
    verdict: Verdict
    feedback: str
    score: float | None  # None when the judge failed: outside the group's statistics
    return_: float | None = None  # "return" in JSON
    advantage: float | None = None

    @property
    def key(self) -> tuple:
        """Order and identity within a run."""
        return self.step, self.task, self.trajectory, self.turn

    @property
    def name(self) -> str:
        """The trajectory's name within a run."""
        return f"{self.step}/{self.task}/{self.trajectory}"

    def to_json(self) -> str:
        """One line of turns.jsonl."""
        row = asdict(self)
        return json.dumps(row | {"return": row.pop("return_")})

    @staticmethod
    def from_json(line: str) -> "Turn":
        """The turn that to_json wrote."""
        row = json.loads(line)
        verdict = row.pop("verdict")
        verdict = Verdict(**verdict | {"seeds": tuple(verdict["seeds"])})
        return Turn(return_=row.pop("return"), verdict=verdict, **row)

    def light(self) -> "Turn":
        """The turn without prompt, answer and tokens, which can take a megabyte and are logged."""
        return replace(self, prompt="", completion="", prompt_ids=[], completion_ids=[],
                       sampling_logprobs=[])


@dataclass
class Trajectory:
    """The turns of one attempt at a task, in order."""

    task: Task
    step: int
    index: int
    turns: list[Turn] = field(default_factory=list)


def parse_program(code: str) -> ast.Module:
    """The syntax tree; SyntaxError also for accents without end, which take Python quadratic time.

    >>> parse_program("x" + "\u0300" * 2001)
    Traceback (most recent call last):
    SyntaxError: too many accents
    """
    if sum(unicodedata.combining(unicodedata.normalize("NFKD", letter)[0]) > 0
           for letter in code if letter > "\x7f") > 1000:
        raise SyntaxError("too many accents")
    return ast.parse(code)


def make_task(row: dict | str, where: str) -> Task:
    """A checked Task from an object or a line of JSON; UserError names the place and the fault."""
    try:
        task = Task(**(json.loads(row) if isinstance(row, str) else row))
        program = parse_program(task.code).body
    except json.JSONDecodeError as e:
        raise UserError(f"{where}: not JSON: {e.msg} (column {e.colno})") from None
    except (TypeError, ValueError, SyntaxError) as e:
        raise UserError(f"{where}: not a task: {e}") from None
    defined = {node.name for node in program if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    faults = [f"{key} must be a string" for key in ("id", "name", "ops")
              if not isinstance(getattr(task, key), str)]
    if task.level not in (1, 2, "new", "tiny"):
        faults.append(f'level must be 1, 2, "new" or "tiny", got {task.level!r}')
    faults += [f"the program does not define {name}"
               for name in ("Model", "get_inputs", "get_init_inputs") if name not in defined]
    if faults:
        raise UserError(f"{where}: {', '.join(faults)}")
    if not isinstance(task.answers, list | tuple) or not all(
            isinstance(a, dict) and {*a} >= {"weight", "text"} for a in task.answers):
        raise UserError(f"{where}: answers must be objects with weight and text")
    return replace(task, answers=tuple(task.answers))


def load_tasks(path: str) -> list[Task]:
    """Tasks of a JSON-lines file, a folder of .py programs or one .py program, in order (3.1)."""
    source, tasks, levels = Path(path), {}, {"level1": 1, "level2": 2}
    if not source.exists():  # the files that come with the script
        source = Path(__file__).parent / path
    try:
        if source.is_dir() or source.suffix == ".py":
            files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
            rows = [(f, {"id": f.stem, "level": levels.get(f.parent.name, "new"), "name": f.stem,
                         "ops": "", "code": f.read_text("utf-8")}) for f in files]
        else:  # not splitlines: a JSON string may hold other line separators
            lines = enumerate(source.read_text("utf-8").split("\n"), 1)
            rows = [(f"{path}:{number}", line) for number, line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: no such task file, or not text ({e})") from None
    for where, row in rows:
        task = make_task(row, where)
        if task.id in tasks:
            raise UserError(f"{where}: id {task.id} occurs twice")
        tasks[task.id] = task
    if not tasks:
        raise UserError(f"{path}: holds no task")
    return list(tasks.values())


def program_part(code: str, classes: bool) -> str:
    """Imports and classes, which the prompt shows (PAPER: D), or the rest, which makes inputs.

    >>> print(program_part("import torch\\nclass Model:\\n    x = 1\\nN = 3", classes=True))
    import torch
    class Model:
        x = 1
    >>> program_part("class Model: pass\\nN = 3", classes=False)
    'N = 3'
    """
    shown = (ast.Import, ast.ImportFrom, ast.ClassDef)
    kept = [node for node in ast.parse(code).body if classes and isinstance(node, shown)
            or not classes and not isinstance(node, ast.ClassDef)]
    return "\n".join(ast.get_source_segment(code, node) for node in kept)


# ---- 4. Prompt, answer, feedback (paper 4.1, D) --------------------------------------------------

EXAMPLE = """Here's an example. For `forward(self, a, b): return a + b` a complete answer is:

```python
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = '''
__global__ void add_kernel(const float* a, const float* b, float* out, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
torch::Tensor add(torch::Tensor a, torch::Tensor b) {
    auto out = torch::empty_like(a);
    int64_t n = a.numel();
    add_kernel<<<(n + 255) / 256, 256>>>(a.data_ptr<float>(), b.data_ptr<float>(),
                                         out.data_ptr<float>(), n);
    return out;
}
'''
ext = load_inline(name="add", cpp_sources="torch::Tensor add(torch::Tensor a, torch::Tensor b);",
                  cuda_sources=source, functions=["add"])

class ModelNew(nn.Module):
    def forward(self, a, b):
        return ext.add(a, b)
```"""
INSTRUCTIONS = """Replace this PyTorch program by a faster one on {name}: do the work of its
operators in your own {language}, compiled with `load_inline` of `torch.utils.cpp_extension`.
Consider {hints}.

Rules, all of them enforced:
- Call `load_inline` at module level; name the new architecture `ModelNew(nn.Module)`. It takes the
  arguments of `Model` and returns one new tensor of the same shape and dtype; inputs stay as is.
- Of `torch.nn` only Module, Parameter, containers and init may be used. Draw the parameters in the
  constructor in `Model`'s order and distribution: equal seeds must give equal weights. They may
  change after construction.
- PyTorch operators, in Python or C++, may allocate, view and copy tensors, but not compute.
- No try, no pass, no global state, no library calls, no streams, threads or files.
- The result must be as exact as float32 (root-mean-square error at most 0.005 % of the output's
  spread, or three times PyTorch's own error where that is larger), on fresh inputs every time.

Answer with the complete program in one fenced block, without test code, and then summarise what
you did in a few sentences. Correctness and speedup over PyTorch eager will be reported back, and
you can improve on it."""
DEVICES = {  # language and hints (PAPER: D names those of the GPU)
    "cuda": ("CUDA C++", "shared memory, fusion, warp primitives and vectorised access"),
    "cpu": ("C++ (`cpp_sources`, one thread)", "fusion, vectorisable loops and access in order")}
ATTEMPTS = "Your earlier attempts follow, each with what the evaluation found."
RETRY = "Restart your reasoning and write a new, complete program."


def base_prompt(task: Task, device: tuple[str, str], example: bool) -> str:
    """The message that states the task: program, rules, and the example in the first turn only (D).

    device is ("cuda" or "cpu", name of what the judge really runs on); the example is for CUDA.
    """
    language, hints = DEVICES[device[0]]
    rules = INSTRUCTIONS.format(name=device[1], language=language, hints=hints)
    parts = [f"```python\n{program_part(task.code, classes=True)}\n```", rules]
    return "\n\n".join(parts + [EXAMPLE] * (example and device[0] == "cuda"))


def build_prompt(task: Task, turns: list[Turn], device: tuple[str, str], chat,
                 max_tokens: int) -> tuple[str, list[int]]:
    """The prompt of the next turn as text and token ids (4.1, D).

    Of every earlier turn it holds the kernel, the model's own summary and the feedback, never a
    thought; an answer without a kernel is an empty message. Over max_tokens, whole oldest turns are
    dropped (PAPER: D), the task never: UserError if it does not fit alone. chat.render(messages)
    gives (text, ids) with the thought opened; chat.control_tokens cannot occur in a message.
    """
    for first in range(len(turns) + 1):
        kept = turns[first:]
        contents = [base_prompt(task, device, not turns) + f"\n\n{ATTEMPTS}" * bool(kept)]
        for turn in kept:
            answer = f"```python\n{turn.kernel}\n```\n\n{turn.summary}".strip()
            contents += [answer if turn.kernel is not None else "", turn.feedback]
        for token in chat.control_tokens:  # none may survive: a space after its first character
            contents = [c.replace(token, token[0] + " " + token[1:]) for c in contents]
        text, ids = chat.render([{"role": ("user", "assistant")[i % 2], "content": content}
                                 for i, content in enumerate(contents)])
        if len(ids) <= max_tokens:
            return text, ids
    raise UserError(f"task {task.id} alone needs {len(ids)} prompt tokens; "
                    f"--max-prompt-tokens is {max_tokens}")


def parse_response(text: str) -> tuple[str, str | None, str]:
    """(thought, kernel, summary); kernel: the first closed block after </think>, or None (4.1).

    >>> parse_response("Okay.\\n</think>\\n```python\\nx = 1\\n```\\nOne line.")
    ('Okay.', 'x = 1', 'One line.')
    >>> parse_response("Okay, still thinking ```python\\nx = 1\\n```")[1] is None
    True
    """
    thought, _, answer = text.partition("</think>")
    block = re.search(r"```[^\n`]*\n(.*?)\n?```", answer, re.DOTALL)
    if block is None:
        return thought.strip(), None, ""
    return thought.strip(), block.group(1), answer[block.end():].strip()


def first_errors(log: str, limit: int = 1500) -> str:
    """The compiler's error lines, first ones first, without private paths, cut to the limit.

    >>> first_errors("[1/2] g++\\n/tmp/a/cpp_source:3:5: error: no y\\n    3 |  y\\nx.h:1: note: z")
    'cpp_source:3:5: error: no y\\n    3 |  y'
    """
    kept, keep = [], 0
    lines = re.sub(r"(?:/[\w.+\-]+)+/([\w.+\-]+)", r"\1", log).splitlines()
    for line in lines:
        if re.search(r"\b(error|fatal)\b|undefined (reference|symbol)", line):
            keep = 3  # the message, and the source lines that the compiler prints below it
        elif re.match(r"\S", line):
            keep = 0
        kept += [line] * (keep > 0)
        keep -= 1
    return "\n".join(kept or lines)[:limit].rstrip()


def feedback(verdict: Verdict) -> str:
    """What the model is told about its attempt, ending with the request to try again (D).

    >>> print(feedback(Verdict("correct", runtime_ms=2.0, baseline_ms=3.0, speedup=1.5)))
    Your program is correct: 2 ms against PyTorch's 3 ms, a speedup of 1.50x. Make it faster.
    Restart your reasoning and write a new, complete program.
    """
    return OUTCOMES[verdict.outcome].format(**asdict(verdict)) + "\n" + RETRY


# ---- 5. Reward-hack filters (paper 6.2, F) -------------------------------------------------------

# Allow-lists over the syntax tree. DEPARTS: the paper looks for words in the text, which rejects
# comments and misses aliases, methods and operators.
MODULES = set("""torch torch.nn torch.nn.init torch.nn.parameter torch.nn.functional torch.utils
    torch.utils.cpp_extension math typing textwrap""".split())  # to import, not to hand on
NAMES_ALLOWED = re.compile(r"""math\.\w+ | __future__\.annotations | textwrap\.dedent
    | typing\.(Any|Callable|Dict|Final|Iterable|List|Literal|Optional|Sequence|Set|Tuple|Union)
    | torch\.( (empty|zeros|ones|full)(_like)? | empty_strided | randn? | tensor | arange | double
    | half | randint | as_tensor | inf | pi | nan
    | b?float(16|32|64)? | u?int(8|16|32|64)? | long | bool | dtype | device | Size | Tensor
    | is_tensor | numel | reshape | (un)?flatten | permute | transpose | (un)?squeeze | narrow
    | select | movedim | swapaxes | broadcast_to | chunk | split | unbind | clone | cat | stack
    | \w+_format | channels_last(_3d)? | no_grad | inference_mode | nn | utils
    | utils\.cpp_extension(\.load_inline)? | nn\.parameter(\.Parameter)? | nn\.functional
    | nn\.init(\.\w+_|\.calculate_gain|\._calculate_fan_in_and_fan_out)?
    | nn\.(Module|Parameter)(List|Dict)? | nn\.(Sequential|Identity)
    )""", re.VERBOSE)  # PAPER: its code has these of torch.nn
METHODS = set("""requires_grad_ data_ptr shape size dim ndim numel nelement nbytes itemsize dtype
    layout device get_device stride is_contiguous is_cuda is_floating_point contiguous view view_as
    reshape reshape_as permute transpose t T mT flatten unflatten ravel squeeze unsqueeze expand
    expand_as repeat narrow select unbind chunk swapaxes movedim broadcast_to unfold type type_as
    detach data clone copy_ fill_ zero_ uniform_ normal_ to cuda float half bfloat16 double int long
    item new_empty new_zeros new_ones new_full element_size requires_grad weight bias append extend
    insert pop copy items keys values join format strip startswith replace split lower upper get
    index bit_length bool byte char short as_strided parameters named_parameters buffers
    named_buffers modules named_modules children eval train update setdefault rstrip lstrip
    splitlines endswith count storage_offset""".split())
BUILTINS = set("""abs all any bin bool callable chr dict divmod enumerate filter float format
    hasattr hash hex id input int isinstance iter len list map max min next oct ord pow print range
    repr reversed round set slice sorted staticmethod str sum super tuple zip AssertionError
    Exception IndexError KeyError NotImplementedError RuntimeError TypeError ValueError
    __name__""".split())
FORBIDDEN = set(dir(builtins)) - BUILTINS  # under that name not even something else
BANNED = {ast.Try: "try", ast.TryStar: "try", ast.Pass: "pass", ast.Global: "global",
          ast.Nonlocal: "nonlocal", ast.Delete: "del", ast.AsyncFunctionDef: "async",
          ast.Await: "await", ast.Yield: "yield", ast.YieldFrom: "yield", ast.MatMult: "@",
          ast.Match: "match"}


class Violation(Exception):
    """A broken rule of section 5: rule, syntax node, message."""


@functools.cache  # or long chains take quadratic time
def dotted(node: ast.AST) -> str:
    """"torch.nn.init" for that chain of attributes, "" for anything else.

    >>> dotted(ast.parse("a.b.c", mode="eval").body), dotted(ast.parse("f().c", mode="eval").body)
    ('a.b.c', '')
    """
    if isinstance(node, ast.Name):
        return node.id
    root = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{root}.{node.attr}" if root else ""


def full_name(node: ast.AST, aliases: dict[str, str]) -> str:
    """A dotted name with its import resolved, "" of a name that no import binds."""
    root, dot, rest = dotted(node).partition(".")
    return aliases[root] + dot + rest if root in aliases else ""


def bound_name(node: ast.AST) -> str:
    """The name that an assignment, argument, function or class binds, "" of other nodes."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    return "" if isinstance(getattr(node, "ctx", None), ast.Load) else dotted(node)


def check_structure(tree: ast.Module) -> dict[str, str]:
    """Classes that are plain nn.Modules, imports from the list; the names that these bind."""
    aliases, nodes = {}, list(ast.walk(tree))
    top = {id(node) for node in tree.body}
    placed = top | {id(node) for outer in nodes if isinstance(outer, ast.FunctionDef)
                    for node in outer.body}  # in a class body it would be an attribute
    for node in nodes:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            whole = isinstance(node, ast.Import)
            full = alias.name if whole else f"{'.' * node.level}{node.module}.{alias.name}"
            allowed = full in MODULES or not whole and NAMES_ALLOWED.fullmatch(full)
            private = "__" in alias.name or "__" in (alias.asname or "")
            if not allowed or private or id(node) not in placed:
                raise Violation("import", node, f"`{full}` may not be imported here")
            short = alias.asname or alias.name.split(".")[0]
            full = full.split(".")[0] if whole and not alias.asname else full
            if aliases.setdefault(short, full) != full or short == "self":
                raise Violation("name", node, "an imported name may not be bound again")
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = collections.Counter(model.name for model in classes)
    if names["ModelNew"] != 1:
        raise Violation("ModelNew", None, "there must be one class ModelNew")
    for model in classes:
        if [full_name(base, aliases) for base in model.bases] != ["torch.nn.Module"] \
                or model.keywords:
            text = f"{model.name} must inherit from nn.Module and nothing else"
            raise Violation("ModelNew", model, text)
        if model.decorator_list or id(model) not in top:
            text = f"{model.name} may not be decorated or lie within another"
            raise Violation("ModelNew", model, text)
    methods = [node for model in classes for node in model.body
               if isinstance(node, ast.FunctionDef)]
    first = {id(node.args.args[0]) for node in methods if node.args.args and not {
        full_name(getattr(d, "func", d), aliases) for d in node.decorator_list
    } - {"torch.no_grad", "torch.inference_mode"}}
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if bound_name(node) == "self" and id(node) not in first:
            raise Violation("name", node, "`self` is the first argument of methods only")
        if bound_name(node) in aliases:
            raise Violation("name", node, "an imported name may not be bound again")
        bound = "" if isinstance(node, ast.ClassDef) else bound_name(node)
        if bound in names or id(node) in owners and dotted(node) in names:
            text = f"`{bound or dotted(node)}` may be neither looked into nor bound again"
            raise Violation("name", node, text)
    return aliases


def extension_handles(tree: ast.Module, aliases: dict[str, str]) -> set[str]:
    """Names that only ever hold a built extension (`ext`, `self.op`): their attributes are free."""
    handles, nodes = set(), list(ast.walk(tree))
    assigned = [(node.value, node.targets[0]) for node in nodes
                if isinstance(node, ast.Assign) and len(node.targets) == 1]
    for _ in range(3):  # a handle may be handed on
        for value, target in assigned:
            called = full_name(getattr(value, "func", value), aliases)
            if called == "torch.utils.cpp_extension.load_inline" or dotted(value) in handles:
                handles.add(dotted(target))
    bound = collections.Counter(map(bound_name, nodes))
    return {name for name in handles - {""} if bound[name] == 1}


BUILDING = "(TORCH_CUDA_ARCH_LIST|TORCH_EXTENSIONS_DIR|MAX_JOBS|CUDA_HOME|CC|CXX)"
SETTING = re.compile(  # none is executed; one that would touch a measurement is refused instead
    rf"os\.environ(\['{BUILDING}'\] = '.*'|\.setdefault\('{BUILDING}', '.*'\))"
    r"|os\.makedirs\(.*\)|torch(\.cuda)?\.manual_seed(_all)?\(\d+\)")


def without_annotations(tree: ast.Module) -> ast.Module:
    """The program without annotations, which compute nothing and may name any type.

    >>> ast.unparse(without_annotations(ast.parse("def f(x: int = 1) -> a.b: y: int; z: c = x")))
    'def f(x=1):\\n    None\\n    z = x'
    """
    def plain(node):
        if not isinstance(node, ast.AnnAssign):
            return node
        bare = ast.Assign([node.target], node.value) if node.value else ast.Expr(ast.Constant(None))
        return ast.fix_missing_locations(ast.copy_location(bare, node))

    for node in ast.walk(tree):
        for part, value in ast.iter_fields(node):
            if part in ("annotation", "returns"):
                setattr(node, part, None)
            elif isinstance(value, list):
                setattr(node, part, list(map(plain, value)))
    return tree


def relevant(tree: ast.Module) -> ast.Module:
    """The program without what it only carries along: the task's model, functions that no one
    calls, settings of the compiler, annotations, imports for them.

    >>> text = "import os, math\\nx = math.e\\nif __name__ == '__main__':\\n    os.abort()"
    >>> ast.unparse(relevant(ast.parse(text)))
    'import math\\nx = math.e'
    """
    def carried(node):
        if isinstance(node, ast.If):
            return ast.unparse(node.test) == "__name__ == '__main__'" and not node.orelse
        return isinstance(node, (ast.Assign, ast.Expr)) and SETTING.fullmatch(ast.unparse(node))

    def needed(node):
        if isinstance(node, ast.ClassDef):
            return node.name in used or node.name != "Model"
        if isinstance(node, ast.FunctionDef):
            return node.name in used | {"ModelNew"} or node.decorator_list
        if not isinstance(node, (ast.Import, ast.ImportFrom)) \
                or getattr(node, "module", "") == "__future__":
            return True
        node.names = [alias for alias in node.names
                      if (alias.asname or alias.name).split(".")[0] in used | {"*"}]
        return node.names

    tree.body = [node for node in without_annotations(tree).body if not carried(node)]
    names = {statement: {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
             for statement in tree.body}
    for _ in range(20):  # first what calls the test goes, then the test, its inputs, their imports
        used = set().union(*[names[statement] for statement in tree.body])
        before, tree.body = tree.body, [node for node in tree.body if needed(node)]
        if len(before) == len(tree.body):
            break
    return tree


def check_node(node: ast.AST, aliases: dict[str, str], known: set[str], handles: set[str],
               inner: set[int], own: set[str]) -> None:
    """Raises the rule that one syntax node breaks.

    inner are the ids of nodes before a dot, own the attributes that the program names itself; of
    what they are asked is looked at where it runs.
    """
    if type(node) in BANNED:
        raise Violation(BANNED[type(node)], node, f"`{BANNED[type(node)]}` is not allowed")
    if isinstance(node, ast.Expr) and getattr(node.value, "value", None) is Ellipsis:
        raise Violation("pass", node, "`...` as a body is not allowed")
    if isinstance(node, ast.FunctionDef) and re.fullmatch("__(?!init__).*", node.name):
        raise Violation("dunder", node, f"`{node.name}` may not be defined")
    loads = isinstance(getattr(node, "ctx", None), ast.Load)
    if isinstance(node, ast.Name) and loads and node.id not in known - FORBIDDEN:
        raise Violation("name", node, f"`{node.id}` is not defined here, or not allowed")
    if bound_name(node).startswith("__") and not isinstance(node, ast.FunctionDef):
        raise Violation("dunder", node, f"`{bound_name(node)}` may not be bound")
    full = full_name(node, aliases)
    if full in MODULES and id(node) not in inner:
        raise Violation("name", node, f"`{dotted(node)}` is a module and may not be handed on")
    if not isinstance(node, ast.Attribute):
        return
    chain, base, name = dotted(node), dotted(node.value), node.attr
    if not loads and base != "self":
        raise Violation("assignment", node, "only attributes of self may be assigned")
    called = dotted(node.value.func) if isinstance(node.value, ast.Call) else ""
    if (called, name) == ("super", "__init__") or name == "_calculate_fan_in_and_fan_out":
        return
    if chain == "self.compile":
        raise Violation("torch operator", node, "`self.compile` is the framework's compiler")
    if "__" in name or name[0] == "_" and base != "self":
        raise Violation("dunder", node, f"`.{name}` may not be used")
    if full:
        if not NAMES_ALLOWED.fullmatch(full):
            raise Violation("torch operator", node, f"`{full}` does not allocate or name a type")
    elif base != "self" and base not in handles and name not in METHODS and name not in own:
        raise Violation("torch operator", node, f"`.{name}` is not an allocation, view or copy")


def find_hacks(code: str, device: str = "cpu") -> tuple[str, str] | None:
    """The first rule that the candidate's Python breaks, as (rule, message with its line) (6.2, F).

    Words in comments, strings and C++ text mean nothing. What the compiled code calls is looked at
    by foreign_symbols, what forward dispatches by the judge.

    >>> find_hacks("import os; os.abort()")
    ('import', 'line 1: `os` may not be imported here')
    >>> find_hacks("x = (")
    ('syntax', "line 1: '(' was never closed")
    """
    try:
        tree = relevant(parse_program(code))
        aliases = check_structure(tree)
        handles = extension_handles(tree, aliases)
        nodes = list(ast.walk(tree))
        known = {bound_name(n) for n in nodes} | set(aliases) | BUILTINS
        inner = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
        own = set(re.findall(r"""["'](\w+)["']""", code))  # what extensions are built with
        own |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)} | {
            n.attr for n in nodes if isinstance(n, ast.Attribute) and bound_name(n)}
        for node in nodes:
            check_node(node, aliases, known, handles, inner, own)
        builds = any(full_name(n.func, aliases) == "torch.utils.cpp_extension.load_inline"
                     for n in nodes if isinstance(n, ast.Call))
        if not builds or device == "cuda" and "__global__" not in code:  # PAPER: its code
            raise Violation("no kernel", None, "no kernel is built by load_inline at module level")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        return "syntax", f"line {getattr(e, 'lineno', 1) or 1}: {getattr(e, 'msg', e)}"
    except Violation as e:
        rule, node, message = e.args
        return rule, f"line {getattr(node, 'lineno', 1)}: {message[:300]}"
    finally:
        dotted.cache_clear()
    return None


# The same rules where the program runs, for a name may come to mean something else than it said.


class Guard(ast.NodeTransformer):
    """Turns `x.name` into a call that looks at what x is, and `x.name = y` likewise."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """The guarded expression or target."""
        self.generic_visit(node)
        loads = isinstance(node.ctx, ast.Load)  # no program can bind names with a space
        name = ast.Name("get of" if loads else "own of", ast.Load())
        call = ast.Call(name, [node.value] + [ast.Constant(node.attr)] * loads, [])
        if not loads:
            node.value, call = call, node
        return ast.fix_missing_locations(ast.copy_location(call, node))


def looks_up(text: str) -> bool:
    """Whether str.format, given this text, would look up attributes or items.

    >>> looks_up("{:.2f} {{ a.b }}"), looks_up("{0.a}"), looks_up("{:{0[a]}}")
    (False, True, True)
    """
    return any(re.search(r"[.[]", name or "") or looks_up(spec or "")
               for _, name, spec, _ in string.Formatter().parse(text))


def guarded_space(extensions: list) -> dict:
    """Globals for a program that Guard has been through; extensions are the modules it built."""
    def get(value, name):
        if isinstance(value, types.ModuleType):
            built = any(value is extension for extension in extensions)
            allowed = built or NAMES_ALLOWED.fullmatch(f"{value.__name__}.{name}")
        else:
            allowed = isinstance(value, nn.Module) or name in METHODS
        if name == "format" and (type(value) is not str or looks_up(value)) \
                or name == "index" and torch.is_tensor(value):  # this one is not a list's
            allowed = False
        if type(value) is super and name == "__init__" or allowed and "__" not in name:
            return getattr(value, name)
        raise Violation(f"`.{name}` of a {type(value).__name__} may not be used")

    def own(value):
        if isinstance(value, nn.Module):
            return value
        raise Violation("only attributes of self may be assigned")

    names = {name: getattr(builtins, name) for name in dir(builtins) if name in BUILTINS}
    names |= {"__import__": __import__, "__build_class__": __build_class__,
              "get of": get, "own of": own}
    return {"__name__": "candidate", "__builtins__": names}


MAX_TEXT = 1000
MAX_ITEMS = 64  # numbers that forward may take into Python, or a list may hold on the way
MAX_GIVEN = 1024  # numbers that extensions may give Python in a call, or while it is made
DATA = (torch.Tensor, bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device)


def as_data(value):
    """The same tensor, number or text, or a short list of such, copied; else Violation.

    Nothing else passes between Python and an extension, which could be asked for more; and no list
    is held by both, or so long that Python computes with it.

    >>> as_data([1, (2.0, "a")])
    [1, (2.0, 'a')]
    """
    if type(value) in (list, tuple) and len(value) <= MAX_ITEMS:
        return type(value)(map(as_data, value))
    if isinstance(value, DATA) and not (isinstance(value, str) and len(value) > MAX_TEXT):
        return value
    raise Violation(f"an extension may neither take nor give this {type(value).__name__}; lists "
                    f"may have {MAX_ITEMS} values and texts {MAX_TEXT} letters")


def numbers_in(value) -> int:
    """How many numbers Python can read out of data, at most.

    >>> numbers_in([1, (2.0, None), "2.5 3.5", torch.ones(9)])
    5
    """
    if isinstance(value, (list, tuple)):
        return sum(map(numbers_in, value))
    return len(value) // 2 if isinstance(value, str) else int(isinstance(value, (int, float)))


GIVEN = collections.Counter()  # numbers that extensions gave in this call of the model


def with_data(function):
    """The extension's function, which takes and gives data only, and of numbers not many."""
    def call(*values, **named):
        found = as_data(function(*as_data(values), **{k: as_data(v) for k, v in named.items()}))
        GIVEN["numbers"] += numbers_in(found)
        if GIVEN["numbers"] > MAX_GIVEN:
            raise Violation("the extension gives Python more numbers than it may compute with")
        return found

    return call


def refusing(name: str, where: str = ""):
    """A method that no candidate may call there."""
    def method(*values, **_):
        if name in ("__eq__", "__ne__") and values[-1] is None:
            return NotImplemented  # x == None asks whether x is there
        raise Violation(f"torch's `{name}` may not be used{where}")

    return method


def by_place(operator: str):
    """A method for x[key] that gives views; by tensors or lists it would compute."""
    original, simple = getattr(torch.Tensor, operator), (int, slice, type(None), type(...))

    def method(tensor, key, *value):
        if all(isinstance(k, simple) for k in (key if isinstance(key, tuple) else [key])):
            return original(tensor, key, *value)
        raise Violation("tensors and lists may not be indices in forward")

    return method


# of nn.Module: they look up, by a text, attributes of what a get_submodule of one's own returns,
# or compile
MODULE_REFUSES = """get_submodule set_submodule get_parameter get_buffer load_state_dict
    _load_from_state_dict _replicate_for_data_parallel compile""".split()
TENSOR_OPERATORS = [f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in
                    "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor".split()]
TENSOR_OPERATORS += [f"__{name}__" for name in
                     "neg pos abs invert lt le gt ge eq ne contains reversed repr".split()]
GUARDED = {name: refusing(name, " in forward") for name in TENSOR_OPERATORS} | {
    name: by_place(name) for name in ("__getitem__", "__setitem__")}
UNGUARDED = {name: vars(torch.Tensor)[name] for name in GUARDED if name in vars(torch.Tensor)}


def allow_operators(allowed: bool) -> None:
    """Whether Python's operators compute on the tensors of this process."""
    for name, method in (UNGUARDED if allowed else GUARDED).items():
        setattr(torch.Tensor, name, method)
    for name in GUARDED if allowed else ():
        if name not in UNGUARDED and name in vars(torch.Tensor):
            delattr(torch.Tensor, name)  # and the one of its base class is back


def guard_modules() -> None:
    """Takes from this process's torch what turns a text into an attribute, or hides a refusal."""
    def by_text(action):
        def method(value, name, *rest):
            if "__" in name:
                raise Violation(f"`{name}` may not be looked up")
            return action(value, name, *rest)

        return method

    def inference_mode(mode=True):  # the real one can turn graphs on
        if mode is False:
            raise Violation("`torch.inference_mode(False)` may not be used")
        return torch.no_grad()(mode) if callable(mode) else torch.no_grad()

    for name in MODULE_REFUSES:
        setattr(nn.Module, name, refusing(name))
    container = torch.nn.modules.container
    container.getattr, container.setattr = by_text(getattr), by_text(setattr)
    # told of what a hook raises, instead of its caller
    torch.nn.modules.module.warnings = types.SimpleNamespace(warn=refusing("warn"))
    torch.inference_mode = inference_mode


# Operators for allocation, views and copies, each also with the name of an overload (slice_Tensor);
# not with any suffix, for unfold_backward adds.
OPERATORS_ALLOWED = re.compile(r"""( (empty|zeros|ones|full)(_like)? | new_(empty|zeros|ones|full)
    | (new_)?empty_strided | empty_permuted | fill_? | zero_? | copy_? | _to_copy | clone
    | contiguous | view(_as)? | expand(_as)? | reshape(_as)? | _?unsafe_view | _reshape_alias
    | permute | transpose | t
    | numpy_T | (un)?flatten | (un)?squeeze | select | slice | narrow | as_strided | detach_?
    | alias | to | item | unbind | _local_scalar_dense | is_pinned | lift_fresh | resolve_(conj|neg)
    | _has_compatible_shallow_copy_type | movedim | swapaxes | broadcast_to | chunk
    | split(_with_sizes)? | unfold | type_as | data | set_data | ravel | repeat | mT
    )(_(Tensor|Scalar|int|intlist|sizes|dims?|device|dtype(_layout)?|other|using_ints|memory_format
    |out))*""", re.VERBOSE)
C_ALLOWED = re.compile(r"""( (__)?mem(cpy|move|set|cmp|chr)(_chk)? | str(len|n?cmp|chr) | malloc
    | free | [cr]e?alloc | aligned_alloc | posix_memalign | abort | (__)?[fsv]*n?printf(_chk)?
    | f?put[sc] | putchar | fwrite | fflush | std(out|err) | perror | strerror | s?rand | qsort
    | bsearch
    | (__isoc23_)?strto\w+ | ato[fil]l? | pthread_once | __once_proxy | exit
    | PyEval_(Save|Restore)Thread  # py::gil_scoped_release; C++ that names them is refused
    | omp_(get_(max_threads|num_threads|thread_num|num_procs)|in_parallel) | __gmon_start__
    | __stack_chk_fail | __assert_fail | __errno_location | __tls_get_addr | __cxa_finalize
    | cudaLaunch(Cooperative)?Kernel(ExC)? | __cuda(Push|Pop)CallConfiguration
    | __cuda(R|Unr)egisterFatBinary(End)? | __cudaRegister(Function|Var)
    | __cuda(InitModule|GetKernel|LaunchKernel) | cuda(Get|PeekAt)LastError
    | cudaGetError(String|Name) | cudaFunc(Set|Get)(Attributes?|CacheConfig)
    | cudaOccupancy\w+ | cudaDeviceGet(Attribute|Limit) | cuda(Get|Set)Device
    | cudaGetDevice(Properties(_v2)?|Count)
    | cuda(Runtime|Driver)GetVersion | cudaMem(set|cpy)(2D)?(Async)?
    | cudaMemcpy(To|From)Symbol(Async)? | cudaGetSymbol(Address|Size)
    | cudaCreateChannelDesc | cuda(Create|Destroy)TextureObject | cuda(Device|Stream)Synchronize
    | _ZN3c10lsERSoNS_11DispatchKeyE )""", re.VERBOSE)  # the last prints what x.type() is
CXX_ALLOWED = re.compile(  # the C++ runtime, tensor access, error messages
    r"_ZNK?R?S[absoidt]|_ZNK?9__gnu_cxx|_ZSt|_ZGV|_Zn[wa]|_Zd[la]|__cxa_|__gxx_|_Unwind_"
    r"|_ZT[VIS](N?S[absoidt]|N10__cxxabiv1|N9__gnu_cxx|N3c10|P*K?[a-z]$)"
    r"|_ITM_|_ZNK?2at10TensorBase|_ZNK?3c10|_ZNK?6caffe2|_ZNK?2at8internal|_ZN2at6detail"
    r"|_ZN2at1[45]get_(num_threads|thread_num)|_ZN2at18in_parallel_region"
    r"|_ZNK2at6Tensor4item|_ZN2at38globalDeprecatedTypePropertiesRegistryEv"
    r"|_ZNK2at32DeprecatedTypePropertiesRegistry27getDeprecatedTypePropertiesE"
    r"|_ZN2at4cuda(26getCurrentDeviceProperties|19getDeviceProperties|9warp_size)E")
CXX_DENIED = re.compile(  # of those: threads, files, clocks, streams, dispatcher and global state
    r"St6thread|St7jthread|St11this_thread|St6future|St7promise|__future|_Async|condition_variable"
    r"|10filesystem|filebuf|basic_[io]?fstream|random_device|6chrono|Dispatch|Operator(Handle|Name)"
    r"|RegisterOperators|KernelFunction|PyObject|PyInterpreter|ThreadPool|TaskLauncher|FLAGS_"
    r"|StreamFrom|setCurrent(?:(?!setCurrent).)*Stream|12GetAllocator|DeviceAllocator"
    r"|InferenceMode|CachingAllocator|SetGlobal|Logger|LoadLibrary|dispatch_mode|set_enabled"
    r"|basic_file|Set(CPU)?Allocator|SetStorageImplCreate|SignalHandler|NUMA|GuardImpl|guard_impl"
    r"|TLS|dispatch_key|get(?:(?!get)\w)*Hooks|[gs]et_env|check_env|9serialize"
    r"|CommandLineFlags|FlagParser|DebugInfo|GPUTrace|WarningHandler|StackTraceFetcher|GILHooks"
    r"|AutogradMetaFactory|AutogradState|grad_fn|_register_hook|cpu_caching_alloc|setThreadName"
    r"|tempfile|tempdir|ApproximateClock|CopyBytesFunction|7monitor|has_env|lazy_clone")


# Of these namespaces only what libc10 defines is called, but for CUDA's streams and devices.
IN_CORE = re.compile(r"_ZT[VIS]N3c10|_ZNK?(3c10(?!4cuda)|6caffe2)")
# Functions in no namespace or an unknown one are the candidate's, declared and never defined.
OWN_NAMES = r"_Z\d+(?!THP)|_ZNK?(?!2at|3c10|5torch|8pybind11|6caffe2|9__gnu_cxx)\d"


def foreign_symbols(symbols: list[str], own_binding: frozenset[str],
                    core: frozenset[str]) -> list[str]:
    """Undefined dynamic symbols of a built candidate that it has no business to call (6.2).

    Allowed are own_binding (what an empty binding built the same way needs, and libm), the C++
    runtime without threads and files, tensor access, CUDA launches, and operators that allocate,
    view or copy. Of c10 what core (libc10) holds: types and errors, while the same namespace in
    other libraries finds methods by their names. Macros and templates hide no call from the linker.

    >>> names = ["_ZN2at4_ops2mm4callE", "memcpy", "_ZN2at4_ops5zeros4callE", "dlsym"]
    >>> foreign_symbols(names, frozenset(), frozenset())
    ['aten::mm', 'dlsym']
    """
    foreign = []
    for name in (symbol.split("@")[0] for symbol in symbols):
        operator = re.match(r"_ZN(2at4_ops|K2at6Tensor(?!4item))(\d+)(\w+)", name)
        if len(name) > 2000:  # none is, and the patterns below would take quadratic time
            foreign += [name]
        elif operator:
            scope, length, called = operator.groups()
            called = called[: int(length)]  # methods that may be called are defined in a header
            allowed = "_ops" in scope and OPERATORS_ALLOWED.fullmatch(called)
            foreign += [] if allowed else [f"aten::{called}"]
        elif name not in own_binding and not C_ALLOWED.fullmatch(name):
            allowed = CXX_ALLOWED.match(name) and not CXX_DENIED.search(name)
            allowed = allowed and (name in core or not IN_CORE.match(name))
            foreign += [] if allowed else [name]
    return foreign


# ---- 6. The judge: gates, compiler, sandbox, checks, timer (paper 3.1) ---------------------------
#
# The parent (this process) owns the reference, the seeds, the clock and the verdict. The zygote is
# this file started once, with torch imported and no CUDA context; it forks a child for every build
# and every candidate. A child is hostile from the moment it loads the candidate: its output is not
# read, its messages are bounded JSON, and only bytes that equal the parent's answer earn anything.

BUILD_TIMEOUT_S, RUN_TIMEOUT_S, CHECK_TIMEOUT_S, MAX_EXTENSIONS = 180.0, 60.0, 300.0, 8
DISK_NEEDED, SPARES = 256 << 20, 2  # workers that start ahead: one takes as long as a verdict
MESSAGE_LIMIT, CHILD_MEMORY, CHILD_FILE = 1 << 20, 8 << 30, 256 << 20  # bytes
LIBRARY_LIMIT, HOST_LIMIT, PROGRAM_LIMIT = 16 << 20, 64 << 20, 100_000


def send_message(sock: socket.socket, message: dict, fds=()) -> None:
    """One JSON object, with file descriptors beside it; the socket keeps message boundaries."""
    data = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    if len(data) > MESSAGE_LIMIT:
        raise OSError(errno.EMSGSIZE, "message too long")
    socket.send_fds(sock, [data], list(fds))


def said(value, limit: int = 2000) -> str:
    """A hostile process's value as text that every encoder takes."""
    return str(value)[:limit].encode(errors="replace").decode()


def receive_message(sock: socket.socket, max_fds: int = 0) -> tuple[dict, list[int]]:
    """The next message; EOFError when the peer is gone, ValueError for anything but an object."""
    data, fds, _, _ = socket.recv_fds(sock, MESSAGE_LIMIT, max_fds)
    if not data:
        raise EOFError
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message, fds


# The sandbox: layers that a freshly forked child enters, each of which forbids an earlier one.

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVS = 1, 4, 22, 38  # of prctl
DENIED_CALLS = (  # ptrace, mounts, modules, keys, namespaces, perf, foreign memory, bpf, io_uring
    101, 134, 153, 155, 161, 165, 166, 167, 169, 175, 176, 179, 246, 248, 249, 250, 272, 298, 303,
    304, 308, 310, 311, 312, 313, 321, 323, 425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)

CANDIDATE_CALLS = (  # connect, fork, threads, files' modes, owners, times, attributes, affinity
    41, 42, 56, 57, 58, 90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199, 203, 235, 260, 261,
    268, 280, 435, 452, 463, 466)


def libc(function: str, *args) -> int:
    """A C library call: strings are encoded, integers widened, failure is an OSError."""
    kinds = {int: ctypes.c_long, str: str.encode}
    result = LIBC[function](*[kinds.get(type(a), lambda a: a)(a) for a in args])
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock(readable: list[str], writable: list[str]) -> None:
    """Files below readable may be read and run, below writable written; no other file opens."""
    abi = libc("syscall", 444, None, 0, 1)
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    handled = struct.pack("QQQ", rights, 3 * (abi >= 4), 3 * (abi >= 6))  # also TCP, signals
    ruleset = libc("syscall", 444, handled, 8 if abi < 4 else 16 if abi < 6 else 24, 0)
    for paths, access in ((readable, 0b1101), (writable, rights)):  # run, read file, read folder
        for path in filter(os.path.exists, paths):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            mask = rights if os.path.isdir(path) else 0b111 | 3 << 14
            libc("syscall", 445, ruleset, 1, struct.pack("=Qi", access & mask & rights, fd), 0)
            os.close(fd)
    libc("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc("syscall", 446, ruleset, 0)
    os.close(ruleset)


def seccomp(candidate: bool) -> None:
    """DENIED_CALLS, and sockets other than AF_UNIX, fail with EPERM (x86-64 only).

    A candidate's own process makes no CANDIDATE_CALLS either.
    """
    if platform.machine() != "x86_64":
        raise OSError(0, "not x86-64")
    op = struct.Struct("HBBI").pack
    deny, allow, kill = (op(6, 0, 0, v) for v in (0x50001, 0x7FFF0000, 0x80000000))
    program = [op(0x20, 0, 0, 4), op(0x15, 1, 0, 0xC000003E), kill]  # another architecture
    program += [op(0x20, 0, 0, 0), op(0x35, 0, 1, 1 << 30), kill]  # the x32 calls
    for number in DENIED_CALLS + CANDIDATE_CALLS * candidate:
        program += [op(0x15, 0, 1, number), deny]
    program += [op(0x15, 0, 3, 41), op(0x20, 0, 0, 16), op(0x15, 1, 0, socket.AF_UNIX), deny, allow]
    code = ctypes.create_string_buffer(b"".join(program))
    libc("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filters = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc("prctl", SET_SECCOMP, 2, filters, 0, 0)


def new_mounts(own_pids: bool) -> None:
    """A private view of the mounts with an empty /dev/shm and, in a PID namespace, its /proc."""
    libc("unshare", NEWNS)
    libc("mount", None, "/", None, 1 << 14 | 1 << 18, None)  # recursive, private
    libc("mount", "tmpfs", "/dev/shm", "tmpfs", 0, "size=256m,mode=1777")
    if own_pids:  # CUDA refuses to start in a PID namespace under the old /proc
        libc("mount", "proc", "/proc", "proc", 14, None)


def set_limits() -> None:
    """Bounds on memory, files and processes; the parent bounds time."""
    for name, value in {"CORE": 0, "FSIZE": CHILD_FILE, "NOFILE": 512, "NPROC": 256,
                        "DATA": CHILD_MEMORY}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    Path("/proc/self/oom_score_adj").write_text("1000")  # nothing bounds shared memory


def other_user(uid: int, needed: list[str]) -> None:
    """Becomes a user without rights, unless a needed path would then be closed."""
    needed = list(filter(os.path.exists, needed))
    os.setgroups([])
    os.seteuid(uid)
    closed = [path for path in needed if not os.access(path, os.R_OK, effective_ids=True)]
    os.seteuid(0)
    if closed:
        raise OSError(0, f"{closed[0]} is closed to other users")
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc("prctl", SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self belongs to root


def enter_sandbox(spec: dict, own_pids: bool) -> dict[str, str]:
    """Tries every layer; {layer: "on" or why not}. spec has readable, writable and uid."""
    readable, writable = spec["readable"], spec["writable"]
    plain = ("null", "zero", "urandom", "shm")
    nodes = [f"/dev/{d}" for d in os.listdir("/dev") if d in plain or d.startswith("nvidia")]
    layers = {"pids": "on" if own_pids else "no PID namespace"}
    for layer, action in {
        "network": lambda: libc("unshare", NEWNET | NEWIPC | NEWUTS),
        "mounts": lambda: new_mounts(own_pids), "limits": set_limits,
        "user": lambda: other_user(spec["uid"], readable + writable),
        "capabilities": lambda: libc("syscall", 126, struct.pack("II", 0x20080522, 0), bytes(24)),
        "death signal": lambda: libc("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0),
        "landlock": lambda: landlock(readable + ["/proc", "/sys"],
                                     writable + nodes + ["/proc/self"]),
        # CUDA may need those calls for its start: not tried on a GPU
        "seccomp": lambda: seccomp(candidate=not writable and spec["device"] == "cpu"),
    }.items():
        try:
            action()
            layers[layer] = "on"
        except OSError as e:
            layers[layer] = e.strerror or str(e)
    return layers


# The zygote and its children: the other side.


def zygote_main(fd: int) -> None:
    """Forks one sandboxed child a request until the parent is gone; no CUDA, no threads."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    torch.set_num_threads(1)
    with OperatorListener():  # its first use imports for two seconds
        torch.zeros(1)
    gc.disable()  # what a candidate lets go shall not choose when it ends
    gc.freeze()  # and a collection looks at its objects only
    parent, own_pids = socket.socket(fileno=fd), os.open("/proc/self/ns/pid", os.O_RDONLY)
    uid, gid = os.getuid(), os.getgid()
    if uid != 0 and LIBC.unshare(NEWUSER) == 0:  # gives an ordinary user the other namespaces
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                           ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    while True:
        try:
            spec, (sock,) = receive_message(parent, max_fds=1)
        except EOFError:
            os._exit(0)
        isolated = LIBC.unshare(NEWPID) == 0  # the next fork is process 1 of a new namespace
        pid = os.fork()
        if pid == 0:
            child_main(sock, spec, isolated)
        if isolated:
            libc("setns", own_pids, NEWPID)
        pidfd = os.pidfd_open(pid)
        send_message(parent, {"pid": pid}, [pidfd])
        os.close(pidfd)
        os.close(sock)


def child_main(fd: int, spec: dict, isolated: bool) -> None:
    """A forked child: enters the sandbox, says which layers hold, then serves the parent."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open("/dev/null", os.O_RDWR)
        for target in range(3):
            os.dup2(null, target)
        for other in map(int, os.listdir("/proc/self/fd")):  # the zygote's own channel among them
            if other > 2 and other != fd:
                with contextlib.suppress(OSError):
                    os.close(other)
        sock, layers = socket.socket(fileno=fd), enter_sandbox(spec, isolated)
        send_message(sock, {"layers": layers})
        os.environ.clear()
        os.environ.update(spec["env"])
        worker = Worker(spec["device"])
        modes = torch.inference_mode(), torch._C.DisableTorchFunctionSubclass()
        for mode in modes:  # no graph, whose nodes could be asked to compute; and torch hands its
            mode.__enter__()  # functions to no one who has a __torch_function__
        while True:
            message, fds = receive_message(sock, max_fds=16)
            op, secret = message.pop("op"), message.pop("secret")
            try:
                reply = {"ok": True, **(getattr(worker, f"do_{op}")(fds=fds, **message) or {})}
            except Exception as e:  # whatever the candidate raises is data for the verdict
                reply = {"ok": False, "error": described(e)}
            try:
                send_message(sock, reply | {"secret": secret})
            except OSError as e:  # often a socket takes no more than 400 KB
                if e.errno != errno.EMSGSIZE:
                    raise
                error = "what the program gives to load_inline is too long"
                send_message(sock, {"ok": False, "error": error, "secret": secret})
    finally:
        os._exit(0)


def described(e: Exception) -> str:
    """An exception as text; its own text may be a refused operation."""
    try:
        return f"{type(e).__name__}: {e}"[:4000]
    except Exception as other:
        return f"{type(e).__name__}, and its text: {type(other).__name__}"[:4000]


class OperatorListener(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the aten operators that are dispatched under it, by name."""

    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.device, self.names = device, collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        there = not torch.is_tensor(result) or result.device.type == self.device
        self.names[func.overloadpacket.__name__ if there else "copy to another device"] += 1
        return result

    def heard(self, calls: int) -> list[str]:
        """The names; many elements taken one by one are what Python computes with."""
        many = self.names["item"] + self.names["_local_scalar_dense"] > MAX_ITEMS * calls
        return sorted(self.names) + ["item, again and again"] * many


class Worker:
    """The child's side of every command: it builds, or holds one module and its calls."""

    def __init__(self, device: str):
        self.device, self.weights, self.kept, self.modules = device, None, (), []

    def do_build(self, folder: str, stages: list, fds) -> None:
        """Runs the command lines of each stage side by side, until one fails."""
        os.chdir(folder)
        self._stand_back()
        with open("log", "wb") as log:
            for stage in stages:
                running = [subprocess.Popen(argv, stdout=log, stderr=log) for argv in stage]
                try:
                    if any([process.wait(BUILD_TIMEOUT_S) for process in running]):
                        return
                except subprocess.TimeoutExpired:
                    with contextlib.suppress(OSError):  # the log may be as large as a file can be
                        os.pwrite(log.fileno(), b"error: compiling took too long\n", 0)
                    return

    def _stand_back(self) -> None:
        os.nice(15)  # a compiler waits while a kernel is timed
        if self.device == "cuda":  # and disturbs the clock of one on the GPU least of all
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    def do_start(self, fds) -> None:
        """Makes the CUDA context and loads torch's kernels for a run: most of a worker's time."""
        torch.cuda.set_per_process_memory_fraction(GPU_SHARE)
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        task = "import torch\ndef get_inputs():\n    return [torch.randn(1 << 17)]"
        self.do_open(task, size=1 << 19, calls=1, total=1 << 20, fds=())
        self.do_run(1, listen=False, idle=True, fds=())

    def do_open(self, inputs: str, size: int, calls: int, total: int, fds) -> dict:
        """The memory of all calls, and a model that does nothing."""
        self.task, pointer, handle = {"__name__": "task"}, ctypes.c_void_p(), IpcHandle()
        exec(compile(inputs, "task", "exec"), self.task)
        if self.device == "cpu":
            self.memory = (ctypes.c_char * total).from_buffer(mmap.mmap(fds[0], total))
            pointer.value = ctypes.addressof(self.memory)
            for option, value in ((-4, 0), (-1, 1 << 30)):  # the heap keeps what is let go, or page
                libc("mallopt", option, value)  # faults, at times, would be most of a call
        else:
            cuda("cudaMalloc", ctypes.byref(pointer), total)
            cuda("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        like = seeded_inputs(self.task["get_inputs"], 0, self.device)
        # twice: what the model does to a tensor itself is not seen through the other one
        self.slots, self.true_slots = (
            call_slots(pointer.value, like, size, calls, self.device) for _ in range(2))
        self.shared = self.held = [(pointer.value, pointer.value + total)]
        self.idle = lambda *_: torch.empty(size, dtype=torch.uint8, device=self.device)
        _ = [self.idle().fill_(1) for _ in self.slots]  # memory that no one wrote is read too fast
        return {"handle": bytes(handle).hex()}

    def do_load(self, code: str, names: list | None, fds) -> dict:
        """Runs a program with these built extensions, or (None) records its load_inline calls.

        The stand-in spares the real module's import, which takes a second and asks CUDA for itself.
        """
        calls, extensions, built = [], [], iter(zip(names or (), fds))
        if names is None:  # beside others that are timed
            self._stand_back()

        def load_inline(name, cpp_sources, cuda_sources=(), functions=None, extra_cflags=(),
                        extra_cuda_cflags=(), extra_ldflags=(), **_):
            call = {"cpp": cpp_sources, "cuda": cuda_sources, "functions": functions,
                    "flags": [*(extra_cflags or ()), *(extra_cuda_cflags or ())],
                    "ldflags": extra_ldflags}
            calls.append({k: [v] if isinstance(v, str) else list(v or ()) for k, v in call.items()})
            if names is None:
                extensions.append(types.ModuleType("recorded"))
                extensions[-1].__getattr__ = lambda name: lambda *_, **__: None  # what it will have
                return extensions[-1]
            name, fd = next(built)
            loader = importlib.machinery.ExtensionFileLoader(name, f"/proc/self/fd/{fd}")
            module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
            loader.exec_module(module)
            extensions.append(types.ModuleType(name))
            vars(extensions[-1]).update({
                name: with_data(function) for name, function in vars(module).items()
                if callable(function) and "__" not in name})
            self.modules.append(module)
            return extensions[-1]

        stand_in = types.ModuleType("torch.utils.cpp_extension")
        stand_in.load_inline = load_inline
        sys.modules["torch.utils.cpp_extension"] = torch.utils.cpp_extension = stand_in
        program, self.guarded = ast.parse(code), names != []  # a task's own model is free
        self.space = guarded_space(extensions) if self.guarded else {"__name__": "task"}
        if self.guarded:
            guard_modules()
            program = Guard().visit(relevant(program))
        exec(compile(program, "candidate", "exec"), self.space)
        return {"calls": calls if names is None else None}

    def do_prepare(self, name: str, weights: int, fds) -> None:
        """Makes the module under a weights seed, unless it is there.

        First, before new inputs are drawn, whatever the run before has left comes to its end: who
        lets go of memory may be called for it.
        """
        self.kept = ()
        gc.collect()
        GIVEN.clear()
        if self.device == "cuda":
            torch.cuda.synchronize()
        if weights != self.weights:
            allow_operators(True)
            if self.device == "cuda":  # torch.Tensor(n, m), the old way, asks for no device
                torch.set_default_tensor_type("torch.cuda.FloatTensor")
            with torch.device(self.device):
                self.model = seeded_model(self.space[name], self.task["get_init_inputs"], weights)
            torch.set_default_tensor_type("torch.FloatTensor")
            # asked for now: a module may do work when it is asked, and later that would be too late
            held = [p.untyped_storage() for p in self.model.parameters()]
            self.held = self.shared + [(h.data_ptr(), h.data_ptr() + h.nbytes()) for h in held]
            allow_operators(not self.guarded)
        self.weights = weights

    def do_run(self, count: int, listen: bool, idle: bool, fds) -> dict:
        """Calls on the first slots, the outputs copied into them, with a claim of what each is.

        All outputs are kept, so that no call gets another's memory. Timed, some elements of the
        inputs come into place just before the call, so that none does the work of the next; on a
        GPU some of the output are read before the end, and other streams, which wait for neither,
        can begin no earlier and end no later.
        """
        outputs, claims, found, timed = [], [], [], self.device == "cuda" and not listen
        listener = OperatorListener(self.device) if listen else contextlib.nullcontext()
        draws = torch.Generator(self.device).manual_seed(fresh_seed())
        late = [[] if listen else [withhold(x, draws) for x in inputs if torch.is_tensor(x)]
                for inputs, _ in self.true_slots[:count]]
        probes = [Probe(place) for _, place in self.true_slots[:count] if timed]
        self.kept = outputs, probes
        for number, (inputs, _) in enumerate(self.slots[:count]):
            if timed:
                torch.cuda.synchronize()  # or what a kernel marks to persist outlives the flush
                cuda("cudaCtxResetPersistingL2Cache")
                for _ in range(3):  # long enough to hide the launches after it
                    self.flush.zero_()
            for flat, places, values in late[number]:
                flat.scatter_(0, places, values)
            if timed:
                probes[number].start()
            GIVEN.clear()
            with listener:
                out = (self.idle if idle else self.model)(*inputs)
            if timed:  # whether or not forward waited, what follows is no part of its time
                probes[number].end(out)
                torch.cuda.synchronize()
            outputs.append(out)
            found.append(self._memory(out, len(self.true_slots[number][1])))
            claims.append({"type": type(out).__name__[:100]})
            if plain(out):
                claims[-1] |= {"shape": list(out.shape), "strides": list(out.stride()),
                               "dtype": str(out.dtype), "device": out.device.type}
        if self.device == "cuda":
            torch.cuda.synchronize()  # from here on no candidate's code runs
        for (_, place), (memory, _), probe in itertools.zip_longest(
                self.true_slots[:count], found, probes):
            if memory is not None:
                place.copy_(memory)
            if probe:
                probe.keep()
        if self.device == "cuda":
            torch.cuda.synchronize()
        alone = apart([span for _, span in found], self.held)
        for claim, (memory, _), own in zip(claims, found, alone):
            claim["own"] = own and memory is not None
        return {"ms": [probe.ms() for probe in probes], "claims": claims,
                "ops": listener.heard(count) if listen else []}

    def _memory(self, out, size: int) -> tuple[torch.Tensor | None, tuple[int, int]]:
        """The bytes of an output, if they are here, and the addresses that its storage takes."""
        if not plain(out):
            return None, (0, 0)
        storage, data = out.untyped_storage(), out.data_ptr()
        span = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        whole = out.device.type == self.device and span[0] <= data <= span[1] - size
        return raw_bytes(data, size, self.device) if whole else None, span


def plain(out) -> bool:
    """Whether it is a tensor and nothing else, without attributes of its own that hide methods.

    >>> odd = torch.ones(1)
    >>> odd.data_ptr = print
    >>> plain(odd), plain(torch.ones(1)), plain(nn.Parameter(torch.ones(1)))
    (False, True, False)
    """
    return type(out) is torch.Tensor and not out.__dict__


def apart(spans: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[bool]:
    """Whether each span of addresses meets none of those taken and none before it.

    >>> apart([(0, 4), (4, 8), (6, 9), (20, 21)], [(16, 24)])
    [True, True, False, False]
    """
    return [not any(start < other[1] and other[0] < end for other in taken + spans[:number])
            for number, (start, end) in enumerate(spans)]


class Probe:
    """The events of one call on a GPU, and the output's elements that hold its work before them."""

    def __init__(self, place: torch.Tensor):
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.stream, self.place, self.found = torch.cuda.current_stream(), place, None
        chance = random.SystemRandom()
        self.pace, self.shift = chance.uniform(0.9, 1.0), chance.random()

    def start(self) -> None:
        """Marks the start."""
        self.events[0].record(self.stream)

    def end(self, out) -> None:
        """Reads elements of the output at an even pace: in two steps, for who waits pays them."""
        if plain(out):
            total = len(self.place) // out.element_size()
            count, pace = min(PROBES, total), max(1, int(total / PROBES * self.pace))
            first = int(self.shift * (total - (count - 1) * pace))
            self.where = (count,), (pace,), first
            self.found = out.as_strided(*self.where[:2], out.storage_offset() + first).clone()
        self.events[1].record(self.stream)

    def keep(self) -> None:
        """Puts what was read where the output was copied to."""
        if self.found is not None:
            self.place.view(self.found.dtype).as_strided(*self.where).copy_(self.found)

    def ms(self) -> float:
        """Milliseconds from start to end, once both are over."""
        return self.events[0].elapsed_time(self.events[1])


def withhold(x: torch.Tensor, draws: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Puts values of other elements, which no one can tell from true ones, at random places.

    In a small tensor the places are all there are. Returns (the tensor's bits in a row, the places,
    their true values).
    """
    kinds = {1: torch.int8, 2: torch.int16, 8: torch.int64}
    flat = x.as_strided((x.numel(),), (1,)).view(kinds.get(x.itemsize, torch.int32))
    chance = {"generator": draws, "device": flat.device}
    places = torch.randperm(len(flat), **chance) if len(flat) <= SMALL[x.device.type] else (
        torch.randint(len(flat), (PROBES,), **chance))
    others = torch.randint(max(1, len(flat)), places.shape, **chance)
    values = flat.gather(0, places)  # index_select and index_copy_ take 15 ms each to be loaded
    flat.scatter_(0, places, flat.gather(0, others))
    return flat, places, values


# What both sides compute: equal seeds give equal weights, equal shapes equal places in memory.


def stable_seed(*parts) -> int:
    """A 64-bit seed from any parts, the same on every machine and number of processes."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def seed_torch(seed: int) -> None:
    """Seeds the generators in use here; torch.manual_seed takes half a millisecond for others.

    >>> seed_torch(1)
    >>> first = torch.rand(3)
    >>> bool((first == torch.rand(3, generator=torch.Generator().manual_seed(1))).all())
    True
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def seeded_model(model_class, get_init_inputs, seed: int) -> nn.Module:
    """The module under a weights seed, with its constant parameters (norms at 1 and 0) made random.

    The noise depends on a parameter's shape, value and place among its likes, so reference and
    candidate agree if they register the same parameters, and a kernel that skips gamma is wrong.
    """
    seed_torch(seed)
    arguments = get_init_inputs()
    seed_torch(seed)
    model, seen = model_class(*arguments), []
    for parameter in model.parameters():
        few = parameter.data.reshape(-1)[:64].cpu()  # CUDA takes 20 ms to load a kernel
        if few.is_floating_point() and len(few) and bool((few == few[0]).all()):
            data = parameter.data.cpu()
            if bool((data == few[0]).all()):
                seen.append((tuple(data.shape), float(few[0])))
                noise_seed = stable_seed(seed, seen[-1], seen.count(seen[-1])) >> 16
                noise = torch.Generator("cpu").manual_seed(noise_seed)
                data = data + torch.rand(data.shape, generator=noise, device="cpu") * 0.5
                parameter.data.copy_(data)
    return model


def seeded_inputs(get_inputs, seed: int, device: str) -> list:
    """The task's inputs under a seed, made on the device."""
    seed_torch(seed)
    with torch.device(device):
        return get_inputs()


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t: the worker exports device memory, the parent opens it."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


@functools.cache
def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    torch.cuda.init()
    return ctypes.CDLL(re.search(r"/\S*libcudart\S*", Path("/proc/self/maps").read_text()).group())


def cuda(function: str, *args) -> None:
    """A call of the CUDA runtime; failure is a fault of the judge."""
    status = cuda_runtime()[function](*[ctypes.c_size_t(a) if type(a) is int else a for a in args])
    if status:
        raise JudgeFault(f"{function}: CUDA error {status}")


def raw_bytes(pointer: int, size: int, device: str) -> torch.Tensor:
    """Memory of this process as a tensor of bytes, without a copy."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=torch.uint8)
    described = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2}
    return torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=described), device="cuda")


def aligned(size: int) -> int:
    """Bytes that a tensor takes in shared memory, where each begins as the allocator's would."""
    return -(-size // 512) * 512


def call_slots(pointer: int, inputs: list, size: int, calls: int, device: str) -> list[tuple]:
    """(inputs like these, bytes of the output) of each call, one after another in memory."""
    slots = []
    for _ in range(calls):
        views = []
        for like in [*inputs, torch.empty(size, dtype=torch.uint8, device="meta")]:
            if torch.is_tensor(like):
                strides = torch.empty_like(like, device="meta").stride()
                flat = raw_bytes(pointer, like.nbytes, device).view(like.dtype)
                pointer += aligned(like.nbytes)
                like = flat.as_strided(like.shape, strides)
            views.append(like)
        slots.append((views[:-1], views[-1]))
    return slots


# Compiling: load_inline parses 394,000 header lines three times, 78 CPU-seconds a kernel. Light
# headers and a precompiled one for the binding take the same source in 6 (CPU) to 14 (CUDA).

OPERATORS = ("empty", "empty_like", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like")
LIGHT_HEADER = "\n".join([
    "#pragma once", "#define AT_PER_OPERATOR_HEADERS", "#include <ATen/core/Tensor.h>",
    "#include <ATen/TensorOperators.h>", "#include <ATen/core/grad_mode.h>",
    "#include <c10/util/Exception.h>",
    *[f"#include <{name}>" for name in ("algorithm", "array", "cfloat", "cmath", "iostream",
                                        "numeric", "string", "tuple", "vector")],
    *[f"#include <ATen/ops/{name}.h>" for name in OPERATORS],
    "namespace torch {", "using namespace at;", "using std::nullopt;", "using std::optional;",
    "using Dtype = at::ScalarType;", "inline std::optional<Device> device_of(const Tensor& t) {",
    "    return t.device(); }",
    *[f"constexpr auto k{new} = at::k{old};" for new, old in (
        ("UInt8", "Byte"), ("Int8", "Char"), ("Int16", "Short"), ("Int32", "Int"),
        ("Int64", "Long"), ("Float16", "Half"), ("Float32", "Float"), ("Float64", "Double"))], "}",
    "namespace at {", "using torch::device_of;",
    *[f"struct {name} {{ {name}() {{}} template <class T> explicit {name}(const T&) {{}} }};"
      for name in ("DeviceGuard", "OptionalDeviceGuard")], "}", ""])
NAMED = {  # words whose headers nvcc sees only with them: a twelfth of its time
    r"\b(multi)?map\b": "map", r"\b(multi)?set\b": "set",
    r"\b((re)?set(w|fill|base|precision|iosflags)|quoted|(put|get)_(time|money))\b": "iomanip"}
HEADERS = {  # the full headers' names, and those that every operator includes and none needs
    **dict.fromkeys(("torch/extension.h", "torch/types.h", "torch/all.h", "torch/torch.h",
                     "torch/script.h", "torch/python.h", "torch/nn.h", "ATen/ATen.h",
                     "ATen/Functions.h"),
                    "#pragma once\n#include <kevin_light.h>\n"),
    "ATen/core/grad_mode.h": "#pragma once\n#include <c10/core/GradMode.h>\nnamespace at {\n"
    "using c10::GradMode; using c10::AutoGradMode;\n"
    "struct NoGradGuard { NoGradGuard() {} };\n}\n",  # no_grad is on
    **dict.fromkeys(("ATen/Context.h", "ATen/TensorUtils.h", "ATen/DeviceGuard.h"),
                    "#pragma once\n"),
    "c10/cuda/CUDAGuard.h": "#pragma once\n#include <c10/cuda/CUDAStream.h>\n"  # one device: no-ops
    "namespace c10::cuda {\nstruct OptionalCUDAGuard { OptionalCUDAGuard() {}\n"
    "    template <class T> explicit OptionalCUDAGuard(const T&) {} };\n"
    "using CUDAGuard = OptionalCUDAGuard;\n}\n"
    "namespace at::cuda { using c10::cuda::OptionalCUDAGuard; using c10::cuda::CUDAGuard; }\n",
    "kevin_light.h": LIGHT_HEADER,
    # else a definition of one's own could stand for a forbidden name until the library is loaded
    "kevin_exports.map": "{ global: PyInit_*; local: *; };\n",
    "kevin_real.h": "#include <c10/macros/Macros.h>\n#include <c10/util/Half.h>\n"
    "#include <complex>\n"  # for nvcc torch's complex numbers bring Thrust, a sixth of all lines
    "#pragma push_macro(\"__CUDACC__\")\n#undef __CUDACC__\n#include <c10/util/complex.h>\n"
    "#pragma pop_macro(\"__CUDACC__\")\n",
    "kevin_syntax.h": "\n".join(f"#include <{name}.h>" for name in (
        "kevin_light", "cuda_runtime", "cuda_fp16", "device_launch_parameters")),
    "kevin_binding.h": "".join(f"#include <{name}>\n" for name in (
        "kevin_light.h", "torch/csrc/utils/pybind.h", "torch/csrc/Exceptions.h", "iostream",
        "any", "signal.h", "pybind11/numpy.h", "pybind11/functional.h", *NAMED.values()))}
NO_MODULE = """#define PYBIND11_MODULE(name, m) \\
    static_assert(false, "PYBIND11_MODULE is for cpp_sources; or name what to bind in functions");\\
    template <class T> void kevin_no_module(T m)"""
THRUST = re.compile(  # code that may need it, or what it includes in turn
    r"complex|thrust|\bcub|(?<!at::)(?<!c10::)\bcuda(::|\s*;)|cccl|_fp[468]|e\dm\d"
    r"|[<\"](nv|ATen/native)/", re.IGNORECASE)
SAMPLE = """std::vector<torch::Tensor> f(torch::Tensor a, std::vector<torch::Tensor> b,
    std::optional<torch::Tensor> c, int64_t d, double e, bool g, std::string h,
    std::vector<int64_t> i, std::pair<int, int> j, std::array<int64_t, 2> l,
    std::tuple<int, int> m) { return {a}; }
std::tuple<torch::Tensor, double> k(const torch::Tensor& a, float b, int c) {
    TORCH_CHECK(b > 0, "b is ", c); return {a, b}; }
int64_t n(unsigned a, size_t b, torch::Dtype c, torch::Device d, at::IntArrayRef e) {
    return a + b + e.size(); }"""


def run_tool(*argv) -> str:
    """Output of a trusted tool; JudgeFault when it fails."""
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=600,
                          errors="replace")
    if done.returncode:
        raise JudgeFault(f"{Path(argv[0]).name} failed: {first_errors(done.stderr, 500)}")
    return done.stdout


def demangled(names: list[str]) -> list[str]:
    """C++ names as one reads them, or as they are where that takes much time or memory.

    >>> demangled(["_Z1fv", "dlsym"])
    ['f()', 'dlsym']
    """
    limited = 'ulimit -t 1; ulimit -v 500000; exec c++filt -s gnu-v3 "$@" < /dev/null'
    argv = ["sh", "-c", limited, "sh", *names]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tool:
        found = tool.stdout.read(100_000).decode(errors="replace").splitlines()
        tool.kill()
    return found if len(found) == len(names) else names


def syntax_error(log: str, text: str) -> str:
    """What in g++'s log proves CUDA text wrong, or "": nvcc takes seconds to see a typing error.

    g++ knows neither launches, which are cut out, nor what is built into device code: an unknown
    name that is not called may be a type, and then nothing that follows proves anything.

    >>> syntax_error("cuda_source:2:1: error: expected ';' before '}' token", "{ return 1 }")
    "cuda_source:2:1: error: expected ';' before '}' token"
    """
    unknown = re.findall(r"error: .(\w+).*(?:not declared|not been declared|not name a)", log)
    if "fatal" in log or not set(unknown).isdisjoint(re.findall(r"\b\w+\b(?!\s*\()", text)):
        return ""
    sure = re.search(r"^cuda_source:.*error: expected ('[;,)}\]]'( or ';')?) .*(\n .*){0,2}",
                     log, re.MULTILINE)
    return sure.group() if sure else ""


def symbols_of(file: Path | str, which: str, *options: str) -> list[str]:
    """Symbols of an object or (-D) a library, mangled; which is "undefined" or "defined"."""
    lines = run_tool("nm", *options, f"--{which}-only", file).splitlines()
    return [line.split()[-1].split("@")[0] for line in lines]


def write_whole(path: Path, data: bytes) -> None:
    """The file appears with all of its contents or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    partial.write_bytes(data)
    partial.rename(path)


def read_regular(path: Path) -> bytes:
    """Contents of a file that a child wrote; empty unless it is a regular file of bounded size."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            usable = stat.S_ISREG(found.st_mode) and found.st_size <= CHILD_FILE
            return file.read() if usable else b""
    except OSError:
        return b""


def short_log(folder: Path) -> str:
    """The start of a build's log, with its lines cut, for each error repeats a line of the text."""
    log = read_regular(folder / "log")[: 4 << 20]
    return re.sub(rb"(?m)^(.{500}).*", rb"\1", log).decode(errors="replace")


POISONED = " ".join("""asm __asm __asm__ section __section__ symver __symver__ ifunc __ifunc__
    weakref __weakref__ __ASMNAME __ASMNAME2
    """.split() + """attr getattr setattr hasattr delattr doc attr_with_type_hint str_attr_accessor
    obj_attr_accessor accessor_policies process_attribute process_attributes get_override
    get_type_override get_internals type_info of handle_of get_type reinterpret_borrow
    reinterpret_steal borrowed_t stolen_t reduce_ex_impl""".split())  # assembler; Python's objects
PYTHON = re.compile("_?Py[A-Z_]")
PYBIND = re.compile(r"_Z\w*8pybind11\w*")  # its functions by their mangled names
PYTHON_WORDS = r"\b(?!\w*(?:HEAD_INIT|_CAST))(?:_?Py[A-Z_]\w*|(?:tp|nb|sq|mp)_\w+|ob_type)\b"
DOCSTRING = re.compile(r'\b\w+\.doc\(\) *= *"[^"\n]*";')  # no one reads it, and "doc" is poisoned


def has_line_directive(text: str) -> bool:
    """Whether #line may stand in C++ text: it could pass the text off as a system header's.

    >>> has_line_directive("/*\\n*/ # line 1"), has_line_directive("#define line # line")
    (True, False)
    """
    text = re.sub(r"\\[^\S\n]*\n", "", text).replace("*/", "\n")  # joined lines; after a comment
    return bool(re.search(r"^[^\S\n]*(#|%:|\?\?=)[^\S\n]*(line\b|\d|/\*)", text, re.MULTILINE))


# what reaches the assembler, or Python's objects, in text whose literals are cut out; one that
# does not end (a group says so) stays, and takes the rest of the line, or each quote would begin it
LITERAL = re.compile(r"""'(?:\\.|[^'\\])*(?:'|(\\?$))|"(?:\\.|[^"\\])*(?:"|(\\?$))""")
TO_ASSEMBLER = re.compile(r"\b_*(asm|section|symver|ifunc|weakref)_*\b"
                          r"|\b(_?Py(Object|Type|Number)\w*|ob_type|tp_as_\w+)\b")
OWN_NAME = re.compile(r"^[^/]|/proc/|(^|\.\.)/dev/")  # names another file in another process
real_path = functools.lru_cache(10_000)(os.path.realpath)  # each build names 500 of torch's files


def host_assembly(text: str, trusted: list[str]) -> str:
    """Where a candidate's host code, as nvcc hands it to g++, holds text for the assembler (6.2).

    Strings of these words reach the assembler as they are, and no symbol betrays what they say. In
    C++ they are poisoned for g++; in CUDA the device code, between #if 0 and #endif, may hold
    assembly. nvcc writes literals in one plain form. Not looked at is what comes from files in
    trusted folders, by their real names.

    >>> code = '# 7 "cuda_source"\\n#if 0\\nasm("a");\\n#endif\\nint f() asm ("b");\\n'
    >>> host_assembly(code, ["/usr"]), host_assembly('# 7 "/usr/a.h"\\nint f() asm("b");', ["/usr"])
    ('cuda_source:7: ', '')
    """
    # patterns that begin with plain letters are found four times as fast as those with ^
    host = re.sub(r"\n#if 0(?=\n).*?\n#endif(?=\n|\Z)", "", f"\n{text}", flags=re.DOTALL)
    _, *parts = re.split(r'\n# (\d+) "(.*)".*(?=\n)', host)
    known = {name for name in {*parts[1::3]} if not OWN_NAME.search(name) and any(
        real_path(name).startswith(f"{folder}/") for folder in trusted)}
    for number, name, part in zip(parts[::3], parts[1::3], parts[2::3]):
        for line in part.split("\n") if name not in known else ():
            own = re.match(r"# (\d+)", line)
            number = own[1] if own else number
            if TO_ASSEMBLER.search(line) and TO_ASSEMBLER.search(
                    LITERAL.sub(lambda m: m[0] if m.lastindex else "", line)):
                return f"{os.path.basename(name)}:{number}: "
    return ""


class Toolchain:
    """Compilers, light headers and built kernels, in a folder for a torch, compiler and device."""

    def __init__(self, cache: str, device: str):
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        self.device, self.gcc = device, shutil.which("g++")
        self.nvcc = shutil.which("nvcc", path=f"{home}/bin:{os.environ.get('PATH', '')}")
        if not self.gcc or device == "cuda" and not self.nvcc:
            missing = "nvcc is not on PATH (set CUDA_HOME)" if self.gcc else "g++ is not on PATH"
            raise UserError(f"no compiler: {missing}")
        identity = (run_tool("g++", "--version"), torch.__version__, sys.version, device, HEADERS,
                    SAMPLE, POISONED, cpu_name(), 13)
        self.root = Path(cache).expanduser().resolve() / f"{stable_seed(identity):016x}"
        self.include, torch_dir = self.root / "include", Path(torch.__file__).parent
        system = [torch_dir / "include", torch_dir / "include/torch/csrc/api/include",
                  sysconfig.get_path("include"), *torch_dir.parent.glob("nvidia/cu*/include")]
        libraries = [f"-L{torch_dir}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        # what a child may read: no task, no run, no other candidate
        self.readable = ["/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache",
                         sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), str(torch_dir),
                         str(self.include)]
        if device == "cuda":
            home = str(Path(self.nvcc).resolve().parents[1])
            system.append(f"{home}/include")
            self.readable.append(home)
            libraries += ["-lc10_cuda", "-ltorch_cuda", f"-L{home}/lib64", "-lcudart"]
        self.trusted = [os.path.realpath(path) for path in self.readable]
        standard = "c++20" if torch.__version__ >= "2.12" else "c++17"
        common = ["-DTORCH_API_INCLUDE_EXTENSION_H", f"-std={standard}", f"-I{self.include}",
                  *[part for path in system for part in ("-isystem", str(path))]]
        # what is not used leaves the library, and with it the symbols that headers bring along
        host = ["-fPIC", "-fvisibility=hidden", "-ffunction-sections",
                "-fno-ident",  # #ident "..." is written into the assembly as it is
                "--param=ggc-min-heapsize=1000000"]  # g++ frees no memory until it holds a GB
        self.cxx = [self.gcc, *common, *host, "-O1", "-march=native", "-fno-trapping-math",
                    "-fno-math-errno"]
        # one architecture, or each costs a compile; device code is at -O3 unless told otherwise
        self.cuda = [self.nvcc, *common, "-gencode=arch=compute_90a,code=sm_90a",
                     "--expt-relaxed-constexpr", "--extended-lambda", "-DNVTX_DISABLE",
                     *[w for f in host for w in ("-Xcompiler", f)]]
        self.syntax = [*self.cxx, "-fsyntax-only", "-w", "check.cpp"]
        self.binding = [self.gcc, "-shared", "-Wl,--gc-sections", f"{self.include}/binding.o",
                        f"-Wl,--version-script={self.include}/kevin_exports.map"]
        self.link = [*self.binding, "-Wl,--no-as-needed", *libraries]
        for name in ("scratch", "built", "include"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        with open(self.root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may start at once
            self.own_binding = self._prepare(self.root / "symbols.json")
        self.core = frozenset(symbols_of(torch_dir / "lib/libc10.so", "defined", "-D"))

    def _prepare(self, symbols: Path) -> frozenset[str]:
        if not symbols.exists():
            print("kevin: precompiling headers, once, about half a minute", file=sys.stderr)
            for name, text in HEADERS.items():
                if name == "kevin_binding.h" and self.device == "cuda":  # before words are poisoned
                    text += "".join(f"#include <{name}.h>\n" for name in (
                        "cuda_runtime", "cuda_fp16", "cuda_bf16", "ATen/cuda/CUDAContext"))
                (self.include / name).parent.mkdir(parents=True, exist_ok=True)
                (self.include / name).write_text(text)
            self._write_methods()
            self._compile_pybind()
            self._write_poison()
            library = self.root / "sample.so"
            headers = ["kevin_binding.h"] + ["kevin_syntax.h"] * (self.device == "cuda")
            for header in (self.include / name for name in headers):
                run_tool(*self.cxx, "-x", "c++-header", header, "-o", f"{header}.gch")
            sample = {"cpp": [SAMPLE], "cuda": [], "flags": [], "functions": ["f", "k", "n"]}
            self.write(self.root, "sample", sample)
            run_tool(*self.cxx, "-DTORCH_EXTENSION_NAME=sample", "-c", self.root / "main.cpp",
                     "-o", self.root / "main.o")
            run_tool(*self.binding, self.root / "main.o", "-o", library)
            libm = Path(run_tool("g++", "-print-file-name=libm.so.6").strip())
            names = {*symbols_of(library, "undefined", "-D"),
                     *symbols_of(libm, "defined", "-D")}
            write_whole(symbols, json.dumps(sorted(names)).encode())
        return frozenset(json.loads(symbols.read_text()))

    def _write_methods(self) -> None:
        """torch's Tensor, its methods defined only where a candidate may call what they call."""
        aten, called = Path(torch.__file__).parent / "include/ATen", set()

        def kept(method):
            operators = re.findall(r"at::_ops::(\w+)::call", method[0])
            allowed = all(map(OPERATORS_ALLOWED.fullmatch, operators))
            called.update(operators if allowed else ())
            return method[0] if allowed else ""

        def needed(include):
            declared = re.findall(r"struct TORCH_API (\w+)", (aten / include[1]).read_text())
            return "" if called.isdisjoint(declared) else include[0]

        for name, pattern, choose in (
                ("core/TensorBody.h", r"^// aten::.*?^}\n", kept),
                ("MethodOperators.h", r"^#include <ATen/(ops/.*?)>\n", needed)):
            text = re.sub(f"(?ms){pattern}", choose, (aten / name).read_text())
            (self.include / "ATen" / name).write_text(text)

    def _write_poison(self) -> None:
        """The header after which C++ may not name what reaches the assembler or Python."""
        text = "".join(header.read_text("latin-1") for header in
                       Path(sysconfig.get_path("include")).rglob("*.h"))
        constants = re.findall(r"#[ \t]*define[ \t]+(\w+)(?!\w|\()", text)
        words = {*re.findall(PYTHON_WORDS, text)} - {*constants}  # PYBIND11_MODULE needs some
        words |= {*filter(PYBIND.fullmatch, symbols_of(self.include / "binding.o", "defined"))}
        for header in (self.include / "pybind11").rglob("*.h"):
            words |= {*re.findall(r"\bfunction_record\w*", header.read_text())}
        macros = dict(re.findall(r"^#define (_\w+)(?:\(.*?\))? (.*)", run_tool(
            *self.cxx, "-dM", "-E", "-x", "c++", self.include / "kevin_binding.h"), re.MULTILINE))
        writing = {"asm", "__asm", "__asm__"}  # macros that write these were defined before
        for _ in range(4):
            writing |= {name for name, text in macros.items()
                        if not writing.isdisjoint(re.findall(r"\w+", text))}
        words |= writing
        (self.include / "kevin_poison.h").write_text(
            f"#pragma GCC system_header\n#pragma GCC poison {POISONED} {' '.join(sorted(words))}\n")

    def _compile_pybind(self) -> None:
        """Makes binding.o of pybind's own functions, most of a binding; once, not a kernel."""
        pybind, lines = Path(torch.__file__).parent / "include/pybind11", []
        for header in pybind.rglob("*.h"):
            copy, text = self.include / header.relative_to(pybind.parent), header.read_text()
            if header.name not in ("numpy.h", "functional.h"):  # they need more of Python
                text = f"#pragma interface\n{text}"  # g++: who includes it leaves its functions out
                lines.append(f'#pragma implementation "{header.name}"')  # and here they are
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
        source = self.include / "binding.cpp"
        source.write_text("\n".join([*lines, "#include <torch/csrc/utils/pybind.h>", ""]))
        run_tool(*self.cxx, "-c", source, "-o", source.with_suffix(".o"))

    def write(self, folder: Path, name: str, call: dict) -> list[list[list[str]]]:
        """main.cpp and cuda.cu of one extension; the stages of commands that build built.so."""
        text = "\n".join(call["cpp"] + call["cuda"] + call["flags"])
        ops = Path(torch.__file__).parent / "include/ATen/ops"
        named = sorted(set(re.findall(r"\b(?:torch|at)::(\w+)", text)) - set(OPERATORS))
        extra = [f"#include <ATen/ops/{n}.h>" for n in named if os.path.exists(ops / f"{n}.h")]
        extra += [f"#include <{header}>" for word, header in (
            ("AT_DISPATCH", "ATen/Dispatch.h"), ("parallel_for", "ATen/Parallel.h"),
            ("CUDA_VERSION", "cuda.h"), *NAMED.items())
            if re.search(word, text) and (call["cuda"] or header != "cuda.h")]
        flags = re.sub(r"(^|\s)-D\s+", r"\1-D", " ".join(call["flags"])).split()  # as a shell would
        macros = re.findall(r"^-D([A-Za-z_]\w*)(?:=([\w.+\-*()<>:,]+))?$", "\n".join(flags),
                            re.MULTILINE)
        defined = [f"#define {name} {value or 1}" for name, value in dict.fromkeys(macros)]
        lines = ['#include "kevin_binding.h"', *extra,  # the binding at -O1 costs half as much
                 "#pragma GCC push_options", '#pragma GCC optimize("O3")',
                 '#include "kevin_poison.h"', *defined, '#line 1 "cpp_source"',
                 *[DOCSTRING.sub("", cpp) for cpp in call["cpp"]], "#pragma GCC pop_options"]
        if call["functions"]:
            wrap = 'm.def("{0}", torch::wrap_pybind_function({0}), "{0}");'.format
            bound = map(wrap, call["functions"])
            lines += ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *bound, "}"]
        files = {"main.cpp": [*lines, ""]}
        define = f"-DTORCH_EXTENSION_NAME={name}"
        objects = [[*self.cxx, define, "-c", "main.cpp", "-o", "main.o"]]
        if call["cuda"]:
            real = [] if THRUST.search(text) else ["#include <kevin_real.h>"]
            head = [*real, "#include <torch/types.h>", "#include <cuda_runtime.h>"]
            source = [*extra, NO_MODULE, *defined, '#line 1 "cuda_source"', *call["cuda"], ""]
            files["cuda.cu"] = head + source
            text = "\n".join(['#include "kevin_syntax.h"', *source])
            files["check.cpp"] = [re.sub(r"<<<((?!<<<).)*?>>>", lambda m: "\n" * m[0].count("\n"),
                                         text, flags=re.DOTALL)]
            fast = ["--use_fast_math"] * any(f.endswith("-use_fast_math") for f in flags)
            objects.append([*self.cuda, define, *fast, "--keep", "-c", "cuda.cu", "-o", "cuda.o"])
        for file in ("cpp", "cuda"):  # for the lines that a compiler shows below its message
            files[f"{file}_source"] = call[file]
        for file, lines in files.items():
            (folder / file).write_text("\n".join(lines), "utf-8", "replace")
        return [objects, [[*self.link, *[argv[-1] for argv in objects], "-o", "built.so"]]]

    def gate(self, folder: Path, library: bytes, call: dict) -> None:
        """Rejects machine code that holds host assembly or calls what it may not (6.2)."""
        text = read_regular(folder / "cuda.cudafe1.cpp").decode(errors="replace")
        if call["cuda"] and not text:
            raise JudgeFault("nvcc left no host code to look at")
        if len(text) > HOST_LIMIT:
            raise Rejected("compile_error", "", f"the host code has {len(text)} letters")
        place = host_assembly(text, self.trusted)
        if place or call["cuda"] and has_line_directive("\n".join(call["cpp"] + call["cuda"])):
            text = f"{place}no assembly, #line or Python in host code"
            raise Rejected("hack", "host assembly", text)
        foreign = []
        for data, options in ((library, ["-D"]), (read_regular(folder / "cuda.o"), [])):
            with tempfile.NamedTemporaryFile(dir=folder.parent) as copied:
                copied.write(data)
                copied.flush()
                names = symbols_of(copied.name, "undefined", *options) if data else []
            # device code's object holds no binding
            foreign += foreign_symbols(names, self.own_binding, self.core) if options else [
                name for name in names if PYTHON.match(name) or PYBIND.match(name)]
        readable = [name for name in foreign  # each of these may stand for all before it
                    if len(name) < 400 and len(re.findall(r"[ST][0-9A-Z]*_", name)) < 12]
        called = demangled(readable[:5]) or ["(long names)"]
        if foreign and all(re.match(OWN_NAMES, name) for name in foreign):
            text = f"undefined reference to {', '.join(called)}"[:1000]
            raise Rejected("compile_error", "", text)
        if foreign:
            name = called[0].replace("(anonymous namespace)", "").split("(")[0]
            word = (re.findall(r"\w+", name) or ["?"])[-1]
            places = [f"{file}_source:{number}: " for file in ("cpp", "cuda")
                      for number, line in enumerate("\n".join(call[file]).split("\n"), 1)
                      if re.search(rf"\b{re.escape(word)}\b", line.partition("//")[0])]
            text = f"{''.join(places[:1])}the compiled code calls {', '.join(called)}"[:1000]
            raise Rejected("hack", "library call", text)


# The parent's side.


class Rejected(Exception):
    """The candidate failed, by its own doing: outcome, rule, message."""


class Child:
    """The parent's end of a fresh sandboxed process, which may write to a folder of its own.

    It is trusted until a candidate's code runs in it.
    """

    def __init__(self, judge: "Judge", folder: Path | None = None):
        self.judge, self.layers, self.trusted, self.deadline = judge, {}, True, math.inf
        self.sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.sock, other):  # without this a message of 200 KB is too long
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_LIMIT)
        with judge.lock, other:
            self.zygote = judge.zygote  # a restart replaces it
            judge.children += 1
            spec = {"uid": 61000 + judge.children % 1000, "device": judge.device,
                    "readable": judge.chain.readable, "writable": [str(folder)] if folder else [],
                    "env": {"PATH": os.environ.get("PATH", ""), "TMPDIR": str(folder or "/tmp")}}
            try:
                send_message(judge.zygote_sock, spec, [other.fileno()])
                reply, (self.pidfd,) = receive_message(judge.zygote_sock, max_fds=1)
            except (OSError, EOFError, ValueError) as e:
                self.zygote.kill()  # a late answer would be taken for the next child's
                self.zygote.wait()
                raise JudgeFault(f"the zygote is gone ({e})") from None
        self.pid = reply["pid"]
        self.sock.settimeout(30)
        try:
            self.layers = receive_message(self.sock)[0]["layers"]
        except (OSError, EOFError, ValueError, KeyError) as e:
            self.kill()
            raise JudgeFault(f"a child did not start ({e!r})") from None
        on = {name for name, state in self.layers.items() if state == "on"}
        if not ("landlock" in on or {"mounts", "user"} <= on or judge.unsafe):
            self.kill()
            raise UserError(f"candidates cannot be contained on this machine ({self.layers}); "
                            "--unsafe runs them all the same")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def ask(self, op: str, fds=(), timeout_s: float = 0.0, **arguments) -> dict:
        """One command's answer; fails, with a text for the model, if none or a bad one comes."""
        left = self.deadline - time.monotonic()
        self.sock.settimeout(max(0.01, min(timeout_s or RUN_TIMEOUT_S, left)))
        try:
            if select.select([self.sock], [], [], 0)[0] and not self.trusted:
                raise ValueError("it spoke out of turn")
            secret = os.urandom(16).hex()  # who takes over the socket alone does not know it
            send_message(self.sock, {"op": op, "secret": secret, **arguments}, fds)
            reply = receive_message(self.sock)[0]
            if reply.get("secret") != secret:
                raise ValueError("an answer to nothing")
            error = "" if reply.get("ok") is True else said(reply.get("error"))
            error = re.split(r"\n(?:CUDA kernel errors|Exception raised|Search for )", error)[0]
        except TimeoutError:
            error = f"no result within {self.sock.gettimeout():.0f} s"
        except (OSError, EOFError):
            error = "the process died (crash or illegal memory access)"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.zygote.wait(0.05)  # all children die with it
        except (ValueError, RecursionError):
            error = "the process sent an unreadable message"
        return self.fail(error) if error else reply

    def fail(self, error: str):
        """Raises JudgeFault while only our own code has run, or if the zygote died; or Rejected."""
        if self.trusted or self.zygote.poll() is not None:
            raise JudgeFault(f"a child of the judge failed: {error}")
        if error.startswith("Violation: "):
            raise Rejected("hack", "torch operator", error.removeprefix("Violation: "))
        raise Rejected("runtime_error", "", error)

    def send_signal(self, which: int) -> None:
        """Sends it; SIGSTOP only returns when all of the process has stopped."""
        deadline = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError):  # it is gone
            signal.pidfd_send_signal(self.pidfd, which)
            while which == signal.SIGSTOP and self._runs():
                if time.monotonic() > deadline:
                    self.fail("the process does not stop")
                time.sleep(1e-3 * (time.monotonic() > deadline - 9.9))  # most stop at once

    def _runs(self) -> bool:
        """Whether a thread of the process is not stopped; on a GPU it has a dozen."""
        folder = f"/proc/{self.pid}/task"
        try:
            threads = os.listdir(folder)
            for thread in threads:
                with open(f"{folder}/{thread}/stat", "rb", buffering=0) as file:
                    if file.read(1000).rpartition(b") ")[2][:1] in b"RSD":
                        return True
            return not set(os.listdir(folder)).issubset(threads)  # one may just have begun another
        except (ProcessLookupError, FileNotFoundError):  # one has ended, or all of them
            return os.path.exists(folder)

    def kill(self) -> None:
        """Ends the child with all it has started, and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            if self.layers.get("pids") != "on":
                os.killpg(self.pid, signal.SIGKILL)
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # with its whole PID namespace
        self.sock.close()
        self.reap()

    def reap(self) -> None:
        """Waits until the killed child is gone."""
        select.select([self.pidfd], [], [], 10)
        os.close(self.pidfd)


@dataclass(frozen=True)
class Build:
    """A candidate that passed the gates: its Python text and its libraries in load_inline order."""

    code: str
    names: list[str]
    libraries: list[bytes]


class Judge:
    """Builds, checks and times candidates (3.1); every outcome is a Verdict.

    submit() builds in the background, check() has the device to itself. A fault of the judge is
    retried once and then is a judge_error. UserError where candidates cannot be contained.
    """

    def __init__(self, device: str, cache: str, jobs: int = 0, unsafe: bool = False):
        if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
            raise UserError("kernels are built for Hopper (sm_90a), and this GPU is another")
        self.device, self.unsafe, self.lock = device, unsafe, threading.Lock()
        self.device_name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
        self.chain = Toolchain(cache, device)
        self.source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        self.children, self.spares = 0, collections.deque()
        self.baselines: dict[str, tuple] = {}  # what measure() says of eager, by task, on a GPU
        self.idle_ms: dict[str, list[float]] = {}  # least of runs of one and of all calls, on a CPU
        self._start_zygote()
        with Child(self) as probe:
            self.layers = probe.layers
        self.pool = ThreadPoolExecutor(jobs or os.cpu_count())
        self.starter, self.reaper = ThreadPoolExecutor(SPARES), ThreadPoolExecutor(1)
        self.starting, self.quiet = set(), threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.quiet:
            for child in self.starting:  # which may hang
                child.send_signal(signal.SIGKILL)
        self._end_spares()
        for pool in (self.pool, self.starter, self.reaper):
            pool.shutdown(wait=True, cancel_futures=True)
        self.zygote.kill()
        self.zygote.wait()
        self.zygote_sock.close()

    def _start_zygote(self) -> None:
        self.zygote_sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.zygote_sock.settimeout(120)  # the first answer waits for the import of torch
        kept = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_DEVICE_ORDER")
        env = {k: v for k, v in os.environ.items() if k in kept}
        if self.device == "cuda":  # this process's GPU and no other
            number, names = torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES")
            env["CUDA_VISIBLE_DEVICES"] = names.split(",")[number] if names else str(number)
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        argv = [sys.executable, os.path.abspath(__file__), "zygote", str(other.fileno())]
        with other:
            self.zygote = subprocess.Popen(argv, pass_fds=[other.fileno()], env=env,
                                           stdin=subprocess.DEVNULL)

    def next_worker(self) -> Child:
        """A started child; on a GPU others start meanwhile, for the candidates after this."""
        if self.device == "cpu":
            return Child(self)
        while len(self.spares) <= SPARES:
            self.spares.append(self.starter.submit(self._start_worker))
        return self.spares.popleft().result()

    def _end_spares(self) -> None:
        while self.spares:
            spare = self.spares.popleft()
            if not spare.cancel() and not spare.exception():
                spare.result().kill()

    def _start_worker(self) -> Child:
        child = Child(self)
        try:
            with self.quiet:
                self.starting.add(child)
            try:
                child.ask("start", timeout_s=RUN_TIMEOUT_S + CHECK_TIMEOUT_S)  # it may stand still
            finally:
                with self.quiet:
                    self.starting.discard(child)
        except BaseException:
            child.kill()
            raise
        return child

    @contextlib.contextmanager
    def stillness(self):
        """While this lasts, workers that start stand still."""
        with self.quiet:
            try:
                for child in self.starting:
                    child.send_signal(signal.SIGSTOP)
                yield
            finally:
                for child in self.starting:
                    child.send_signal(signal.SIGCONT)

    def _retried(self, action) -> Build | Verdict:
        for _ in range(2):
            try:
                return action()
            except Rejected as e:
                return Verdict(*e.args, device=self.device_name)
            except UserError:
                raise
            except Exception as e:  # a mistake of ours, too, is no reason to end a training run
                fault = e
                with self.lock:
                    lost = self.zygote.poll() is not None
                    if lost:
                        self._start_zygote()
                if lost:
                    self._end_spares()  # they died with their zygote
        return Verdict("judge_error", message=str(fault)[:1000], device=self.device_name)

    def submit(self, code: str) -> Future:
        """A Build or a Verdict, later."""
        return self.pool.submit(self._retried, lambda: self._build(code))

    def _build(self, code: str) -> Build:
        if len(code.encode(errors="replace")) > PROGRAM_LIMIT:
            text = f"the program has more than {PROGRAM_LIMIT} bytes"
            raise Rejected("compile_error", "", text)
        hack = find_hacks(code, self.device)
        if hack:
            raise Rejected("hack", *hack)
        with Child(self) as recorder:
            recorder.trusted = False
            calls = recorder.ask("load", code=code, names=None).get("calls")
        if not isinstance(calls, list) or not 0 < len(calls) <= MAX_EXTENSIONS:
            text = f"load_inline must be called one to {MAX_EXTENSIONS} times, at module level"
            raise Rejected("hack", "no kernel", text)
        keys = ["cpp", "cuda", "flags", "functions", "ldflags"]
        for call in calls:
            values = list(call.values()) if isinstance(call, dict) and sorted(call) == keys else [0]
            if not all(isinstance(v, list) and all(isinstance(t, str) for t in v) for v in values):
                text = "load_inline takes strings and lists of strings"
                raise Rejected("runtime_error", "", text)
            if not all(re.fullmatch(r"[\w:]+", name) for name in call["functions"]):
                raise Rejected("runtime_error", "", "load_inline's functions must be names")
        names = [f"kevin_{stable_seed(call, self.source):016x}" for call in calls]
        return Build(code, names, [self._library(*pair) for pair in zip(names, calls)])

    def _library(self, name: str, call: dict) -> bytes:
        done = self.chain.root / "built" / name  # a library, or why there is none
        with open(f"{done}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                try:
                    write_whole(done, self._compile(name, call))
                except Rejected as e:
                    write_whole(done, json.dumps(e.args).encode())
        found = done.read_bytes()
        if found.startswith(b"["):
            raise Rejected(*json.loads(found))
        return found

    def _compile(self, name: str, call: dict) -> bytes:
        if set(call["ldflags"]) - {"", "-lcudart", "-fopenmp", "-lgomp", "-lm"}:
            raise Rejected("hack", "linker flags", "extra_ldflags are not allowed")
        if call["cuda"] and self.device == "cpu":
            text = "this task runs on a CPU: write C++ in cpp_sources, without cuda_sources"
            raise Rejected("compile_error", "", text)
        with tempfile.TemporaryDirectory(dir=self.chain.root / "scratch") as scratch:
            folder = Path(scratch) / "own"
            folder.mkdir()
            for path, mode in ((scratch, 0o755), (folder, 0o777)):  # for whichever user it will be
                os.chmod(path, mode)
            stages = self.chain.write(folder, name, call)
            with Child(self, folder) as child:
                order = {"folder": str(folder), "timeout_s": 3 * BUILD_TIMEOUT_S}
                if call["cuda"]:
                    child.ask("build", stages=[[self.chain.syntax]], **order)
                    wrong = syntax_error(short_log(folder), "\n".join(call["cuda"]))
                    if wrong:
                        raise Rejected("compile_error", "", wrong)
                child.ask("build", stages=stages, **order)
            log, library = short_log(folder), read_regular(folder / "built.so")
            full = shutil.disk_usage(folder).free < DISK_NEEDED
            if not library and (full or not log):
                raise JudgeFault(f"the build did not run: {log[:500]!r}")
            if 'attempt to use poisoned "' in log:
                raise Rejected("hack", "poisoned word", first_errors(log, 300))
            if not library:
                raise Rejected("compile_error", "", first_errors(log))
            if len(library) > LIBRARY_LIMIT:
                raise Rejected("compile_error", "", f"the library has {len(library)} bytes")
            self.chain.gate(folder, library, call)
            return library

    def check(self, task: Task, build: Build) -> Verdict:
        """Correctness, then time, of a built candidate; nothing else may use the device."""
        return self._retried(lambda: self._check(task, build))

    def _check(self, task: Task, build: Build) -> Verdict:
        seeds, times = [], []
        if self.device == "cuda" and task.id not in self.baselines:
            with Subject(self, task) as eager:  # while no candidate lives
                [self.baselines[task.id]] = measure([eager], [])
        try:
            for _ in range(CLOCK_ATTEMPTS):  # noise is over the next time, hidden work is not
                if times:
                    self.reaper.submit(int).result()  # the end of a context slows others down
                with Subject(self, task, build) as candidate:
                    if not seeds:
                        error, constant = check_outputs(candidate, seeds)
                    times.append(time_candidate(candidate, seeds))
                if times[-1][1] == 0.0:
                    break
            ms, hidden_ms, eager_ms = min(times, key=lambda t: t[0] + t[1])
            refuse_unbelievable(candidate, ms, hidden_ms, constant)
            ms += hidden_ms
            found = Verdict("correct", "", "", ms, eager_ms, eager_ms / ms, error)
        except Rejected as e:
            found = Verdict(*e.args)
        except torch.OutOfMemoryError:  # there was enough before the candidate came
            found = Verdict("runtime_error", "", "it left too little GPU memory for its check")
        reference = "float32" if task.code in ROUNDED else "float64"
        return replace(found, device=self.device_name, seeds=tuple(seeds), reference=reference)


@functools.lru_cache(maxsize=4)
def reference_models(code: str, weights: int, device: str) -> tuple:
    """(get_inputs, Model, the same in float64) of a task program under a weights seed."""
    space: dict = {"__name__": "task"}
    exec(compile(code, "task", "exec"), space)
    with torch.device(device):
        model, exact = (seeded_model(space["Model"], space["get_init_inputs"], weights)
                        for _ in range(2))
    return space["get_inputs"], model, exact.double()


ROUNDED: set[str] = set()  # programs whose float64 run does not fit


def reference_answer(task: Task, weights: int, seed: int, device: str, alone: bool = True) -> tuple:
    """(float64 truth, eager's output, inputs) for two seeds.

    Where float64 takes more memory than there is, float32 without TF32 stands in from then on; not
    alone, that may be a candidate's doing, and is OutOfMemoryError. UserError when the task's
    program raises: it is ours, and its fault ends the command.
    """
    try:
        with forked_rng(device), torch.no_grad():
            get_inputs, model, exact = reference_models(task.code, weights, device)
            inputs, truth = seeded_inputs(get_inputs, seed, device), None
            try:
                wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x
                        for x in inputs]
                truth = None if task.code in ROUNDED else exact(*wide)
            except torch.OutOfMemoryError:
                if not alone:
                    raise
                ROUNDED.add(task.code)
            if truth is None:
                with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                    truth = model(*inputs)
            return truth, model(*inputs), inputs
    except (torch.OutOfMemoryError, torch.AcceleratorError) as e:
        if not alone and isinstance(e, torch.OutOfMemoryError):
            raise
        raise JudgeFault(f"the reference of {task.id} failed: {e}") from None
    except Exception as e:
        if device == "cuda" and not alone and isinstance(e, RuntimeError):
            raise torch.OutOfMemoryError(str(e)) from None  # cuBLAS and cuDNN say it so
        text = f"task {task.id}: its program raised {type(e).__name__}: {e}"
        raise UserError(text.splitlines()[0]) from None


def forked_rng(device: str):
    """A context that leaves this process's random numbers as they were."""
    return torch.random.fork_rng(range(torch.cuda.device_count()) if device == "cuda" else [])


class Subject(Child):
    """A worker that serves a built candidate, or (build=None) the task's own Model for its time.

    It runs only from a command to its answer. A call's inputs come into being while it is stopped,
    in memory that both processes hold, and its output is there when the clock stops.
    """

    def __init__(self, judge: Judge, task: Task, build: Build | None = None):
        self.task, self.device, self.pointer = task, judge.device, ctypes.c_void_p()
        self.name, code = ("ModelNew", build.code) if build else ("Model", task.code)
        try:
            _, eager, inputs = reference_answer(task, 0, 0, self.device, alone=False)
        except torch.OutOfMemoryError:  # the candidate before this one may not have ended yet
            judge.reaper.submit(int).result()
            _, eager, inputs = reference_answer(task, 0, 0, self.device)
        self.get_inputs, model, _ = reference_models(task.code, 0, self.device)
        read = [t.nbytes for t in [*inputs, *model.parameters()] if torch.is_tensor(t)]
        self.size, self.read_bytes = max(1, eager.nbytes), sum(read)
        affordable = SLOT_BYTES[self.device] // (self.read_bytes + self.size)
        self.calls = max(1, min(MAX_CALLS[self.device], affordable))
        vars(self).update(vars(judge.next_worker()))  # this object takes the started child over
        fds = []
        try:
            self._open(inputs, fds)
            idle = [[self._idle(n) for _ in range(IDLE_RUNS[self.device])]
                    for n in (1, self.calls)]
            self.idle_ms = [min(clock for clock, _ in runs) for runs in idle]
            self.idle_event_ms = min(event for _, event in idle[-1])
            if self.device == "cpu":  # no events there, and too much idle time makes a kernel fast
                known = judge.idle_ms.setdefault(task.code, self.idle_ms)
                self.idle_ms = judge.idle_ms[task.code] = list(map(min, self.idle_ms, known))
            self.trusted = build is None
            self.deadline = math.inf if self.trusted else time.monotonic() + CHECK_TIMEOUT_S
            for data in build.libraries if build else ():
                fds.append(sealed_memory(len(data), data))
            self.ask("load", fds[1:], code=code, names=build.names if build else [])
        except BaseException:
            self.kill()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _open(self, inputs: list, fds: list[int]) -> None:
        sizes = [t.nbytes for t in inputs if torch.is_tensor(t)] + [self.size]
        total = self.calls * sum(map(aligned, sizes))
        fds.append(sealed_memory(total))
        reply = self.ask("open", fds, inputs=program_part(self.task.code, classes=False),
                         size=self.size, calls=self.calls, total=total)
        if self.device == "cpu":
            self.memory = (ctypes.c_char * total).from_buffer(mmap.mmap(fds[0], total))
            place = ctypes.addressof(self.memory)
        else:
            handle = IpcHandle.from_buffer_copy(bytes.fromhex(reply["handle"]))
            cuda("cudaIpcOpenMemHandle", ctypes.byref(self.pointer), handle, ctypes.c_uint(1))
            place = self.pointer.value
        self.slots = call_slots(place, inputs, self.size, self.calls, self.device)

    def reap(self) -> None:
        """Lets go of the worker's memory; a GPU takes a tenth of a second to end a context."""
        if self.pointer:
            cuda("cudaIpcCloseMemHandle", self.pointer)
            self.judge.reaper.submit(super().reap)
        else:
            super().reap()

    def ask(self, *args, **arguments) -> dict:
        """One command's answer; the worker is stopped before and after."""
        self.send_signal(signal.SIGCONT)
        try:
            return super().ask(*args, **arguments)
        finally:
            self.send_signal(signal.SIGSTOP)

    def draw(self, seeds) -> None:
        """Inputs under these seeds into the first slots, whose outputs become NaN."""
        with forked_rng(self.device):
            for seed, (inputs, place) in zip(seeds, self.slots):
                place.fill_(255)  # so that what is not written is wrong
                for view, new in zip(inputs, seeded_inputs(self.get_inputs, seed, self.device)):
                    if torch.is_tensor(view):
                        view.copy_(new)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _idle(self, count: int) -> tuple[float, float]:
        if self.device == "cuda":  # as before any run, it goes from this process to the worker
            self.draw([0])
        clock, reply = self.clocked(count, idle=True)
        return clock, statistics.mean(reply["ms"] or [0.0])

    def clocked(self, count: int, listen: bool = False, idle: bool = False) -> tuple[float, dict]:
        """(ms by this process's clock, the answer) of a run on the first inputs."""
        start = time.perf_counter()
        reply = self.ask("run", count=count, listen=listen, idle=idle)
        return (time.perf_counter() - start) * 1e3, reply

    def usual_idle(self, count: int) -> float:
        """ms of a run that did nothing, before any code of the candidate was here."""
        one, every = self.idle_ms
        return one + (every - one) * (count - 1) / max(1, self.calls - 1)

    def less_idle(self, weights: int, count: int, alone: bool) -> float:
        """ms a call by which such a run takes less now, on a GPU; alone: see run().

        Other workers' contexts come into being meanwhile, which may have slowed the first ones. Who
        made this one slow has gained nothing: the lesser counts.
        """
        if self.device == "cpu":
            return 0.0
        self.ask("prepare", name=self.name, weights=weights)
        with self.judge.stillness() if alone else contextlib.nullcontext():
            return (self.usual_idle(count) - self._idle(count)[0]) / count

    def run(self, weights: int, *seeds: int, listen: bool = False,
            alone: bool = False) -> tuple[float, list[float]]:
        """Calls the module, weights and inputs drawn under these seeds, once on every input.

        Returns (ms of a call by this process's clock, the worker's events in ms), both beyond those
        of a call that does nothing. listen: also looks at the operators dispatched; no times then.
        alone: no worker goes on starting meanwhile.
        """
        self.ask("prepare", name=self.name, weights=weights)
        self.draw(seeds)
        with self.judge.stillness() if alone else contextlib.nullcontext():
            elapsed, reply = self.clocked(len(seeds), listen)
        events, ops, self.claims = (reply.get(name) for name in ("ms", "ops", "claims"))
        calls = len(seeds) if self.device == "cuda" and not listen else 0
        if not all(isinstance(x, list) for x in (events, ops, self.claims)) or [
                isinstance(e, float) and e > 0 for e in events] != [True] * calls or [
                isinstance(c, dict) for c in self.claims] != [True] * len(seeds):
            self.fail("the process sent an unreadable message")
        foreign = [op for op in map(said, ops) if not OPERATORS_ALLOWED.fullmatch(op)]
        if foreign:
            message = f"forward runs aten::{', aten::'.join(foreign)}"[:400]
            raise Rejected("hack", "torch operator", message)
        elapsed -= self.usual_idle(len(seeds))
        return elapsed / len(seeds), [event - self.idle_event_ms for event in events]

    def error(self, weights: int, seed: int, slot: int = 0) -> tuple[float, bool]:
        """(error of an output, whether the right answer is constant); Rejected if it is wrong.

        The bytes are compared, which are those of when the clock stopped, for the worker has not
        run since; what it claims can only speak against them.
        """
        truth, eager, drawn = reference_answer(self.task, weights, seed, self.device, alone=False)
        claim, (inputs, place) = self.claims[slot], self.slots[slot]
        texts = {"own": "the output must be a new tensor, no input, parameter or view"}
        strides = list(torch.empty_like(eager, device="meta").stride())
        if claim.get("strides") != strides:
            strides = list(torch.empty(eager.shape, device="meta").stride())
        expected = {"type": "Tensor", "shape": list(eager.shape), "dtype": str(eager.dtype),
                    "device": self.device, "own": True, "strides": strides}
        for key, value in expected.items():
            if claim.get(key) != value:
                text = f"the output's {key} is {said(claim.get(key), 200)} instead of {value}"
                raise Rejected("incorrect", "", texts.get(key, text))
        output = place[: eager.nbytes].view(eager.dtype).as_strided(eager.shape, strides)
        error, problem = compare(output, truth, eager)
        if not all(torch.equal(a, b) for a, b in zip(inputs, drawn) if torch.is_tensor(b)):
            problem = "an input was changed; inputs must stay as they are"
        if problem:
            raise Rejected("incorrect", "", problem)
        return error, bool((truth == truth.view(-1)[0]).all())


def sealed_memory(size: int, data: bytes = b"") -> int:
    """Anonymous memory of fixed size (one that shrinks would kill its reader); data is final."""
    fd = os.memfd_create("kevin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    os.write(fd, data)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | (fcntl.F_SEAL_WRITE if data else 0))
    return fd


def fresh_seed() -> int:
    """A seed that no child has seen."""
    return random.SystemRandom().getrandbits(31)


# Correctness and time.

CLOCK_ATTEMPTS = 5  # of 3, compilers on every core disturbed all in one verdict of 88
TRIALS, WEIGHT_SEEDS = 5, 2  # DEPARTS: the paper's early code has one trial, at a tolerance of 1e-2
MIN_BOUND, EAGER_FACTOR, WORST_FACTOR = 5e-5, 3.0, 100.0
BURST_MS, ROUNDS = {"cpu": 10.0, "cuda": 30.0}, 5  # longer bursts meet the power cap
LISTENED = 3  # rounds; who counts bursts and cheats in three of five is heard in 7 of 10 verdicts
MAX_CALLS, GPU_SHARE = {"cpu": 64, "cuda": 16}, 0.5
ALONE_MS = 1.0
IDLE_RUNS = {"cpu": 5, "cuda": 3}  # before a candidate is loaded; on a GPU more follow (less_idle)
PROBES = 256  # elements of a tensor by which a call is held between its events
SMALL = {"cpu": 1 << 13, "cuda": 1 << 16}  # to this size all: few were mended in a known answer
# what the clock may see beyond an honest kernel's events: of a call, of its time, of a whole run
HIDDEN_MS, HIDDEN_SHARE, RUN_MS = 0.02, 0.05, 0.15
SLOT_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
BANDWIDTH = {"cpu": 2e10, "cuda": 4.8e12}  # bytes a second: one core writing, an H200's memory


def compare(output: torch.Tensor, truth: torch.Tensor, eager: torch.Tensor) -> tuple[float, str]:
    """(error, what is wrong or ""): error is rms(output - truth) / std(truth), truth is float64.

    Accepted up to max(5e-5, 3 x the error of PyTorch eager on the same input) if no element is off
    by more than 100 x that bound x (std + |truth|), with the same non-finite values. Integers must
    be equal.

    >>> truth = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    >>> compare(truth.float(), truth, truth.float())
    (0.0, '')
    >>> compare(torch.zeros(3), truth, truth.float())[1]
    'error 2.1 where 5e-05 is allowed; 3 of 3 elements are off, the first at [0]: 0 instead of 1'
    """
    same = (output == truth) | (output.isnan() & truth.isnan())
    finite = truth.isfinite() & output.isfinite()
    wrong, error, text = ~same & ~finite, math.inf, ""
    if not truth.is_floating_point():
        wrong = ~same
    elif finite.any() and not wrong.any():
        chosen = ... if finite.all() else finite  # to choose costs more than all the rest
        exact = truth[chosen]
        spread = exact.std(correction=0).item() or exact.abs().max().item() or 1.0
        difference = (output.double() - truth).abs()  # NaN where both are infinite
        error, own = (d[chosen].square().mean().sqrt().item() / spread
                      for d in (difference, eager.double() - truth))
        bound = max(MIN_BOUND, EAGER_FACTOR * own)
        wrong = difference > WORST_FACTOR * bound * (spread + truth.abs())
        if error > bound and not wrong.any():
            wrong = difference > bound * spread
        text = f"error {error:.2g} where {bound:.2g} is allowed; "
    if not wrong.any():
        return (error if text else 0.0), ""
    index = tuple(wrong.nonzero()[0].tolist())
    found, right = output[index].item(), truth[index].item()
    return error, (f"{text}{int(wrong.sum())} of {truth.numel()} elements are off, the first at "
                   f"{list(index)}: {found:.6g} instead of {right:.6g}")


def counts_alone(subject: Subject, ms: float) -> bool:
    """Whether no worker may start while calls of so many ms are timed.

    A start takes shares of the GPU's time, which longer calls feel (12 ms became 14), and eager's
    time counts for a whole step.
    """
    return ms < math.inf and (subject.trusted or ms > ALONE_MS)


def burst(subject: Subject, weights: int, ms: float,
          listen: bool = False) -> tuple[float, float, list[int]]:
    """(ms of a call, the same by this process's clock, seeds of the inputs).

    As many calls as fill a burst, on new inputs at the old addresses. On a GPU their events tell,
    the L2 cache flushed before each, on a CPU the clock; the mean, not the median, or one call
    could do the work of all.
    """
    wanted = math.ceil(BURST_MS[subject.device] / max(ms, 1e-3))
    seeds = [fresh_seed() for _ in range(min(subject.calls, wanted) or 1)]
    alone = not listen and counts_alone(subject, ms)
    clock, events = subject.run(weights, *seeds, listen=listen, alone=alone)
    return statistics.mean(events) if events else clock, clock, seeds


def measure(subjects: list[Subject], seeds: list[int]) -> list[tuple[float, float]]:
    """(ms of a call, what the clock saw beyond it at least) of each, from bursts that alternate.

    Outputs of a candidate's timed calls are checked, drawn after the burst: an answer that is
    cached, replayed or left out is a wrong answer. More bursts, at random times, are listened to.
    """
    draw, weights = random.SystemRandom(), fresh_seed()
    rows, less = ([[] for _ in subjects] for _ in range(2))
    first = [min(burst(s, weights, math.inf)[0] for _ in range(3)) for s in subjects]  # warm-up
    listened = draw.sample(range(ROUNDS), LISTENED)
    for turn in range(ROUNDS):
        for which in range(len(subjects))[:: (1, -1)[turn % 2]]:
            subject, early = subjects[which], draw.random() < 0.5
            heard = turn in listened and not subject.trusted
            if heard and early:
                burst(subject, weights, first[which], listen=True)
            ms, clock, inputs = burst(subject, weights, first[which])
            rows[which].append((ms, clock - ms - RUN_MS / len(inputs)))
            first[which] = min(first[which], ms)  # who starts slowly has no shorter bursts
            checked = 0 if subject.trusted else min(2, len(inputs))
            for slot in draw.sample(range(len(inputs)), checked):
                seeds += [weights, inputs[slot]]
                subject.error(*seeds[-2:], slot)
            if turn % 2 == 0:
                alone = counts_alone(subject, first[which])
                less[which].append(subject.less_idle(weights, len(inputs), alone))
            if heard and not early:
                burst(subject, weights, first[which], listen=True)
    found = []
    for row, kept in zip(rows, less):
        middle = statistics.median(ms for ms, _ in row)
        as_fast = middle * (1 + HIDDEN_SHARE)  # or who is honest in one round is forgiven the rest
        least = min(beyond for ms, beyond in row if ms <= as_fast)
        found.append((middle, least + max(0.0, *kept)))
    return found


def check_outputs(candidate: Subject, seeds: list[int]) -> tuple[float, bool]:
    """(worst error of all trials, whether the right answer never changes); Rejected if wrong."""
    worst, constant = 0.0, True
    for trial in range(TRIALS):
        if trial % math.ceil(TRIALS / WEIGHT_SEEDS) == 0:
            weights = fresh_seed()
        seeds += [weights, fresh_seed()]
        candidate.run(*seeds[-2:], listen=True)
        error, same = candidate.error(*seeds[-2:])
        worst, constant = max(worst, error), constant and same
    return worst, constant


def time_candidate(candidate: Subject, seeds: list[int]) -> tuple[float, float, float]:
    """(candidate's ms, ms of it that are hidden from its events, eager's ms).

    On a CPU the two alternate, so that a noisy machine disturbs both; on a GPU eager has been timed
    once a step, and shows what the clock sees beyond events here.
    """
    judge, others = candidate.judge, []
    with contextlib.ExitStack() as stack:
        if candidate.device == "cpu":
            others = [stack.enter_context(Subject(judge, candidate.task))]
        (ms, beyond), *eager = measure([candidate, *others], seeds)
    eager_ms, usual = judge.baselines.get(candidate.task.id) or (eager[0][0], 0.0)
    return ms, max(0.0, beyond - HIDDEN_SHARE * ms - HIDDEN_MS - max(0.0, usual)), eager_ms


def refuse_unbelievable(candidate: Subject, ms: float, hidden_ms: float, constant: bool) -> None:
    """Rejects a time that cannot be; constant: the answer could be written without reading."""
    # no output shows whether a constant was computed: three times what reading all inputs takes
    moved = 3 * candidate.read_bytes if constant else candidate.size / 3
    if ms + hidden_ms < moved / BANDWIDTH[candidate.device] * 1e3:
        text = f"{ms:.3g} ms for {moved / 2**20:.3g} MiB of memory traffic"
        raise Rejected("suspicious", "too fast", text)
    if hidden_ms > 0.5 * ms + 0.3:  # work on another stream
        text = f"{hidden_ms:.3g} ms a call lie outside the timed events of {ms:.3g} ms"
        raise Rejected("suspicious", "clock", text)


def cpu_name() -> str:
    """The processor's name; the judge uses one thread of it."""
    names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return f"one thread of {names[0] if names else platform.machine()}"


# ---- 7. Score, return, advantage (paper 3.2, 4.2, 4.3, B.2) --------------------------------------


def kernel_score(verdict: Verdict, correct_weight: float = 0.3) -> float | None:
    """S = 0.3 * [correct] + speedup * [correct], uncapped; None when the judge failed (3.2).

    >>> kernel_score(Verdict("correct", speedup=2.0)), kernel_score(Verdict("incorrect"))
    (2.3, 0.0)
    """
    if verdict.outcome == "judge_error":
        return None
    return correct_weight + verdict.speedup if verdict.outcome == "correct" else 0.0


def discounted_returns(scores: list[float | None], gamma: float = 0.4,
                       aggregate: str = "sum") -> list[float]:
    """Return of every turn: its own score and the later ones, discounted (PAPER: 4.3).

    sum: R_t = S_t + gamma R_{t+1}; max: R_t = max(S_t, gamma R_{t+1}). A missing score counts as 0.

    >>> [round(r, 3) for r in discounted_returns([0.0, 1.3, 0.0, 2.3])]
    [0.667, 1.668, 0.92, 2.3]
    """
    returns, later = [], 0.0
    for score in reversed(scores):
        own = score or 0.0
        later = own + gamma * later if aggregate == "sum" else max(own, gamma * later)
        returns.append(later)
    return returns[::-1]


def group_advantages(returns: list[float | None], scale: bool = False) -> list[float]:
    """Returns of one task's m * n samples minus their mean (4.2; PAPER: its code, Dr. GRPO).

    scale divides by their deviation. None marks a sample that the judge failed on: outside the
    statistics, with advantage 0. A group that agrees within 1e-6 gets exact zeros (its mean is off
    by a rounding step); before a division, also one that agrees within the timer's noise, 2 %.

    >>> [round(a, 3) for a in group_advantages([0.0, 1.3, None, 2.6])]
    [-1.3, 0.0, 0.0, 1.3]
    >>> group_advantages([1.30, 1.31, 1.32], scale=True)
    [0.0, 0.0, 0.0]
    """
    known = [r for r in returns if r is not None]
    floor = max([1e-6, 0.02 * scale * max(known, default=0.0)])
    if not known or max(known) - min(known) < floor:
        return [0.0] * len(returns)
    centre, spread = statistics.fmean(known), statistics.pstdev(known) if scale else 1.0
    return [0.0 if r is None else (r - centre) / spread for r in returns]


# ---- 8. Policy: model, adapter, token log-probabilities (paper 3.3, 6.1) -------------------------

HEAD_CHUNK = 1024  # positions that pass the head at once: full logits of 16k tokens take 40 GB


class Policy(nn.Module):
    """A causal language model with a LoRA adapter, and its tokenizer.

    DEPARTS: the paper most likely trains all weights; with an adapter one GPU holds 32B parameters.
    """

    def __init__(self, lm: nn.Module, tokenizer):
        super().__init__()
        self.lm, self.tokenizer = lm, tokenizer
        self.joined: list[JoinedLinear] = []
        added = [t.content for t in tokenizer.added_tokens_decoder.values()]
        self.control_tokens = tuple({*tokenizer.all_special_tokens, *added, "<think>", "</think>"})
        ends = getattr(lm.generation_config, "eos_token_id", None)
        ends = ends if isinstance(ends, list) else [ends]
        self.eos_ids = {i for i in [*ends, tokenizer.eos_token_id] if i is not None}

    @property
    def base(self) -> nn.Module:
        """The transformers model, with the adapter's layers in place."""
        return self.lm.get_base_model() if hasattr(self.lm, "get_base_model") else self.lm

    def trainable(self) -> list[nn.Parameter]:
        """The adapter's weights."""
        return [p for p in self.lm.parameters() if p.requires_grad]

    def render(self, messages: list[dict]) -> tuple[str, list[int]]:
        """Text and ids of a chat with the answer's thought opened (PAPER: its code)."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                  add_generation_prompt=True)
        text += "" if text.endswith("<think>\n") else "<think>\n"
        return text, self.tokenizer(text, add_special_tokens=False).input_ids

    def decode(self, completion_ids: list[int]) -> str:
        """Text of a completion without its end token."""
        ended = completion_ids and completion_ids[-1] in self.eos_ids
        return self.tokenizer.decode(completion_ids[: -1 if ended else None])

    def _head(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float):
        logits = self.base.get_output_embeddings()(hidden).float() / temperature
        return -nn.functional.cross_entropy(logits, targets, reduction="none")

    def forward(self, prompt_ids: list[int], completion_ids: list[int],
                temperature: float) -> torch.Tensor:
        """Log-probabilities of the completion's tokens at the sampling temperature: (T,), float32.

        One sequence, no mask; on a GPU padded on the right to a multiple of 256, for fewer plans.
        """
        ids = prompt_ids + completion_ids
        padding = -len(ids) % 256 if self.lm.device.type == "cuda" else 0
        row = torch.tensor([ids + [0] * padding], device=self.lm.device)  # (1, length)
        backbone = getattr(self.base, self.base.base_model_prefix)
        hidden = backbone(input_ids=row, use_cache=False).last_hidden_state[0]
        hidden = hidden[len(prompt_ids) - 1 : len(ids) - 1]  # position t predicts t + 1
        targets = row[0, len(prompt_ids) : len(ids)]
        head = functools.partial(torch.utils.checkpoint.checkpoint, self._head, use_reentrant=False)
        chunks = zip(hidden.split(HEAD_CHUNK), targets.split(HEAD_CHUNK))
        return torch.cat([head(h, t, temperature) for h, t in chunks])


@dataclass(eq=False)
class JoinedLinear:
    """Linear layers that read one input, with their adapters, as one matrix.

    y = [x, x A'] [W, s B]': the layers' rows of W below one another, their adapters' s B beside
    them, each in columns of its own. Everything is read once, and sampling and training round
    alike; peft would round W x by itself and multiply in float32 without tensor cores.
    """

    layers: list[nn.Module]  # peft's, in the order of their calls; their weights are views
    weight: torch.Tensor  # (outputs, inputs + ranks)
    down: torch.Tensor  # (ranks, inputs), the A of every layer
    bias: torch.Tensor | None
    sampling: bool = False  # no update can happen meanwhile: refresh() was called
    source: torch.Tensor | None = None  # what the first layer was called with
    output: tuple = ()  # every layer's share of the answer

    def adapters(self) -> list[tuple]:
        """(A, B, the layer's rows of weight, its ranks, its scale) of every layer."""
        found, row, rank = [], 0, 0
        for layer in self.layers:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            scale = 0.0 if layer.disable_adapters else layer.scaling["default"]
            found.append((a, b, slice(row, row + len(b)), slice(rank, rank + len(a)), scale))
            row, rank = row + len(b), rank + len(a)
        return found

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the adapters' weights, which an update has changed."""
        right = self.weight[:, self.down.shape[1] :]
        for a, b, rows, ranks, scale in self.adapters():
            self.down[ranks] = a
            right[rows, ranks] = b * scale

    def share(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """One layer's answer to x: (..., inputs) to (..., its outputs)."""
        if x is not self.source:
            if not self.sampling:
                self.refresh()
            pairs = [parameter for adapter in self.adapters() for parameter in adapter[:2]]
            y = AdaptedLinear.apply(x, self, *pairs)
            self.source, self.output = x, y.split([m.out_features for m in self.layers], dim=-1)
        mine = self.output[self.layers.index(layer)]
        if layer is self.layers[-1]:  # they are called in order
            self.source, self.output = None, ()
        return mine


class AdaptedLinear(torch.autograd.Function):
    """[x, x A'] [W, s B]' with gradients for x, A and B; W is frozen."""

    @staticmethod
    def forward(ctx, x, joined, *_):
        """x (..., inputs) to (..., outputs); the adapters' parameters are there for autograd."""
        both = with_down(x, joined.down)
        ctx.save_for_backward(both)
        ctx.joined = joined
        return nn.functional.linear(both, joined.weight, joined.bias)

    @staticmethod
    def backward(ctx, grad):
        """Gradients of x, nothing, and every layer's A and B."""
        joined, [both] = ctx.joined, ctx.saved_tensors
        inputs, grad = joined.down.shape[1], grad.flatten(0, -2)
        x, hidden = both.flatten(0, -2).tensor_split([inputs], dim=-1)
        back = grad @ joined.weight
        through = back[:, inputs:]
        down, up = through.T @ x, grad.T @ hidden
        pairs = [(down[ranks].to(a.dtype), scale * up[rows, ranks].to(b.dtype))
                 for a, b, rows, ranks, scale in joined.adapters()]
        back = torch.addmm(back[:, :inputs], through, joined.down)
        return back.view(*both.shape[:-1], inputs), None, *[g for pair in pairs for g in pair]


@torch.no_grad()
def join_linears(lm: nn.Module) -> list[JoinedLinear]:
    """Joins the model's adapted layers: queries, keys and values; gate and up; others alone."""
    groups: dict[tuple[str, str], list[nn.Module]] = {}
    for name, module in lm.named_modules():
        if isinstance(module, peft.tuners.lora.Linear):
            parent, _, leaf = name.rpartition(".")
            kind = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(leaf, leaf)
            groups.setdefault((parent, kind), []).append(module)
    found = []
    for layers in groups.values():
        bases, ranks = [m.base_layer for m in layers], sum(m.r["default"] for m in layers)
        inputs, outputs = bases[0].in_features, [m.out_features for m in layers]
        ranks += -ranks % 8  # cuBLAS wants rows of 16 bytes
        weight = bases[0].weight.new_zeros(sum(outputs), inputs + ranks)
        for base, rows in zip(bases, weight.split(outputs)):
            rows[:, :inputs] = base.weight
            base.weight.data = rows[:, :inputs]
        bias = None if bases[0].bias is None else torch.cat([m.bias for m in bases])
        found.append(JoinedLinear(layers, weight, weight.new_zeros(ranks, inputs), bias))
        for layer in layers:
            layer.joined = found[-1]
            layer.forward = types.MethodType(lambda self, x: self.joined.share(self, x), layer)
    return found


def compile_elementwise(lm: nn.Module) -> None:
    """Compiles norms, rotary embedding and gated activation, one kernel each (5 s, once)."""
    torch._dynamo.config.recompile_limit = 64  # training, sampling and prefill differ in shape
    compiled, modeling = functools.partial(torch.compile, dynamic=True), sys.modules[lm.__module__]
    for norm in {type(m) for m in lm.modules() if type(m).__name__.endswith("RMSNorm")}:
        norm.forward = compiled(norm.forward)
    if hasattr(modeling, "apply_rotary_pos_emb"):
        modeling.apply_rotary_pos_emb = compiled(modeling.apply_rotary_pos_emb)
    gated = compiled(lambda gate, up: nn.functional.silu(gate) * up)

    def forward(mlp, x):
        return mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))

    for module in lm.modules():
        if hasattr(module, "gate_proj") and lm.config.hidden_act == "silu":
            module.forward = types.MethodType(forward, module)


def with_adapter(lm: nn.Module, tokenizer, rank: int, alpha: int, adapter: str = "") -> Policy:
    """A Policy that trains a float32 LoRA adapter on all linear layers: fresh, or from a folder."""
    if not adapter:  # no dropout: the first ratio of an update must be 1
        lm = peft.get_peft_model(lm, peft.LoraConfig(
            r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear",
            task_type="CAUSAL_LM"))
    elif (Path(adapter) / "adapter_config.json").exists():
        lm = peft.PeftModel.from_pretrained(lm, adapter, is_trainable=True)
    else:
        raise UserError(f"{adapter} holds no adapter (adapter_config.json)")
    for module in lm.modules():  # the base's own dropout is off for the same reason
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    policy = Policy(lm, tokenizer)
    policy.joined = join_linears(lm)
    if lm.device.type == "cuda":
        torch.cuda.empty_cache()  # the unjoined weights
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        compile_elementwise(policy.base)
    return policy


def load_policy(config: Config) -> Policy:
    """The bf16 model on this process's GPU, with a fresh adapter or config.adapter."""
    folder, name = Path(config.model).expanduser(), config.model
    if folder.is_dir() or name[0] in "./~":
        name = str(folder)
        if not (folder / "config.json").exists():
            raise UserError(f"model folder {name} does not exist or has no config.json")
        if not config.random_weights and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise UserError(f"model folder {name} holds no weights (*.safetensors)")
    if not torch.cuda.is_available():
        raise UserError(f"{name} needs an NVIDIA GPU and there is none; --tiny runs on the CPU")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return read_policy(name, device, torch.cuda.mem_get_info()[0], config)


def read_policy(name: str, device: torch.device, free_bytes: int, config: Config) -> Policy:
    """Tokenizer and bf16 weights of a folder or from the Hub, and the adapter, on a device."""
    kind, how = transformers.AutoModelForCausalLM, dict(
        dtype=torch.bfloat16, attn_implementation="sdpa")
    try:
        shape = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as e:
        raise UserError(f"cannot load {name}: {str(e).splitlines()[0]}") from None
    with torch.device("meta"):
        empty = kind.from_config(shape)
    # two bytes a weight, and a quarter more and 4 GiB for adapter, optimiser and activations
    needed = sum(p.numel() for p in empty.parameters()) * 2.5 / 2**30 + 4
    if free_bytes / 2**30 < needed:
        raise UserError(f"{name} needs about {needed:.0f} GiB on one GPU and "
                        f"{free_bytes / 2**30:.0f} are free; --tiny runs on the CPU")
    torch.manual_seed(config.seed)  # the same fresh adapter on every process
    if config.random_weights:
        with device:
            lm = kind.from_config(shape, **how)
    else:
        lm = kind.from_pretrained(name, device_map={"": device}, **how)
    return with_adapter(lm, tokenizer, config.lora_rank, config.lora_alpha, config.adapter)


# ---- 9. Engine: sampling (paper C) ---------------------------------------------------------------

SERVER_ATTEMPTS, SERVER_PAUSE_S = 7, 1.0  # pauses double: two minutes in all
SERVER_TIMEOUT_S = 3600  # for one answer


@dataclass(eq=False)
class Request:
    """One answer being sampled."""

    owner: Trajectory
    prompt: str
    prompt_ids: list[int]
    max_new_tokens: int
    draws: random.Random  # one uniform number a token: a sample depends on its own seed only
    pages: list[int] = field(default_factory=list)  # of the engine's pool
    cache: object = None  # transformers' own, where pages do not fit the model
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


try:  # comes with CUDA builds of torch
    import triton
    import triton.language as tl
except ImportError:  # the plain torch beside each kernel is used instead
    triton = tl = None
kernel, constexpr = (triton.jit, tl.constexpr) if triton else (lambda function: function, None)

PAGE_TOKENS = 256  # tokens whose keys and values are handed out together
SPARE_PAGES = 4  # GUESS: free pages a running sequence, below which nothing new is admitted
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # one graph each


@kernel
def down_kernel(x, down, out, partial, counter, rows, inputs, x_stride, out_stride,
                ranks: constexpr, padded: constexpr, TILES: constexpr, SLICES: constexpr,
                M: constexpr, K: constexpr):
    """out = [x, x down']: each program copies and multiplies a slice of 16 rows; the last sums."""
    piece, block = tl.program_id(0), tl.program_id(1)
    row, rank = block * M + tl.arange(0, M), tl.arange(0, padded)
    total = tl.zeros([M, padded], tl.float32)
    for tile in range(TILES):
        column = (piece * TILES + tile) * K + tl.arange(0, K)
        inside = (row < rows)[:, None] & (column < inputs)[None, :]
        part = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        tl.store(out + row[:, None] * out_stride + column[None, :], part, mask=inside)
        inside = (rank < ranks)[:, None] & (column < inputs)[None, :]
        weight = tl.load(down + rank[:, None] * inputs + column[None, :], mask=inside, other=0.0)
        total = tl.dot(part, tl.trans(weight), total)
    place = tl.arange(0, M)[:, None] * padded + rank[None, :]
    tl.store(partial + (block * SLICES + piece) * M * padded + place, total)
    tl.debug_barrier()
    if tl.atomic_add(counter + block, 1, sem="acq_rel") == SLICES - 1:
        total = tl.zeros([M, padded], tl.float32)
        for other in range(SLICES):
            total += tl.load(partial + (block * SLICES + other) * M * padded + place,
                             cache_modifier=".cg")
        inside = (row < rows)[:, None] & (rank < ranks)[None, :]
        tl.store(out + row[:, None] * out_stride + inputs + rank[None, :],
                 total.to(out.dtype.element_ty), mask=inside)
        tl.store(counter + block, 0)


@functools.cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Counters of finished programs; the kernel that uses them leaves them at zero."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def with_down(x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[x, x down']: (..., inputs) and (ranks, inputs) to (..., inputs + ranks)."""
    ranks, inputs = down.shape
    rows = x.numel() // inputs
    if not x.is_cuda or triton is None or rows > 512 or ranks > 256 or x.dtype == torch.float32:
        return torch.cat([x, nn.functional.linear(x, down)], dim=-1)
    out, tiles = x.new_empty(*x.shape[:-1], inputs + ranks), -(-inputs // 128)
    each = max(2, -(-tiles // 64))  # tiles a program
    slices, blocks, padded = -(-tiles // each), -(-rows // 16), triton.next_power_of_2(ranks)
    padded = max(16, padded)
    partial = torch.empty(blocks * slices * 16 * padded, device=x.device)
    x = x.reshape(rows, inputs)
    down_kernel[(slices, blocks)](
        x, down, out, partial, arrivals(x.device), rows, inputs, x.stride(0), inputs + ranks,
        ranks, padded, each, slices, 16, 128)
    return out


@kernel
def attention_kernel(query, key, value, keys, values, tables, lengths, chunk, partial, norms,
                     counter, out, batch_q, head_q, batch_k, head_k, batch_v, head_v, table_width,
                     scale, GROUP: constexpr, padded: constexpr, WIDTH: constexpr, PAGE: constexpr,
                     N: constexpr, SLOTS: constexpr, HEADS: constexpr):
    """One chunk of a sequence for the query heads of one key head; the last program combines."""
    row, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, size = tl.load(lengths + row), tl.load(chunk)
    first, end = slot * size, tl.minimum((slot + 1) * size, length)
    programs = tl.maximum(tl.cdiv(length, size), 1)  # one for an unused row, which gets zeros
    if slot >= programs:
        return
    member, lane, token = tl.arange(0, padded), tl.arange(0, WIDTH), tl.arange(0, N)
    if (end == length) & (length > 0):  # the newest token's keys and values join the pool
        page = tl.load(tables + row * table_width + (length - 1) // PAGE).to(tl.int64)
        place = ((page * PAGE + (length - 1) % PAGE) * HEADS + head) * WIDTH + lane
        tl.store(keys + place, tl.load(key + row * batch_k + head * head_k + lane))
        tl.store(values + place, tl.load(value + row * batch_v + head * head_v + lane))
        tl.debug_barrier()
    mine = (member < GROUP)[:, None]
    q = tl.load(query + row * batch_q + (head * GROUP + member)[:, None] * head_q + lane[None, :],
                mask=mine, other=0.0)
    top, norm = tl.full([padded], -1e30, tl.float32), tl.zeros([padded], tl.float32)
    total = tl.zeros([padded, WIDTH], tl.float32)
    for start in range(first, end, N):  # N divides PAGE and the chunk
        page = tl.load(tables + row * table_width + start // PAGE).to(tl.int64)
        place = ((page * PAGE + start % PAGE + token) * HEADS + head) * WIDTH
        inside = (start + token < end)[:, None]
        k = tl.load(keys + place[:, None] + lane[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where((start + token < end)[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weight, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        v = tl.load(values + place[:, None] + lane[None, :], mask=inside, other=0.0)
        total = total * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        norm, top = norm * shrink + tl.sum(weight, 1), higher
    base = (row * HEADS + head) * SLOTS * padded + member
    norm = tl.maximum(norm, 1e-30)
    total, norm = total / norm[:, None], top + tl.log2(norm)
    target = out + (row * HEADS * GROUP + head * GROUP + member)[:, None] * WIDTH + lane[None, :]
    if programs == 1:
        tl.store(target, total.to(out.dtype.element_ty), mask=mine)
    else:
        tl.store(partial + (base + slot * padded)[:, None] * WIDTH + lane[None, :], total)
        tl.store(norms + base + slot * padded, norm)
        tl.debug_barrier()
        if tl.atomic_add(counter + row * HEADS + head, 1, sem="acq_rel") == programs - 1:
            top, norm = tl.full([padded], -1e30, tl.float32), tl.zeros([padded], tl.float32)
            total = tl.zeros([padded, WIDTH], tl.float32)
            for other in range(programs):
                place = base + other * padded
                part = tl.load(norms + place, cache_modifier=".cg")
                piece = tl.load(partial + place[:, None] * WIDTH + lane[None, :],
                                cache_modifier=".cg")
                higher = tl.maximum(top, part)
                weight, shrink = tl.exp2(part - higher), tl.exp2(top - higher)
                total = total * shrink[:, None] + piece * weight[:, None]
                norm, top = norm * shrink + weight, higher
            tl.store(target, (total / norm[:, None]).to(out.dtype.element_ty), mask=mine)
            tl.store(counter + row * HEADS + head, 0)


def split_slots(batch: int, kv_heads: int) -> int:
    """Programs that may share a sequence: an average one gets a quarter, a long one all."""
    return max(4, min(32, 4096 // (batch * kv_heads)))


def decode_attention(query, key, value, keys, values, tables, lengths, chunk, scale):
    """Attention of one new token a row over its pages: query (B, heads, D) to (B, 1, heads, D).

    key and value, (B, kv_heads, D), are written to the pool first. chunk is the number of tokens
    that one program reads, a multiple of 64, at least lengths.max() / split_slots.
    """
    batch, heads, width = query.shape
    kv_heads, slots = key.shape[1], split_slots(batch, key.shape[1])
    group = heads // kv_heads
    padded = max(16, 1 << (group - 1).bit_length())
    norms = torch.empty(batch * kv_heads * slots * padded, device=query.device)
    partial = torch.empty(len(norms) * width, device=query.device)
    out = torch.empty(batch, 1, heads, width, dtype=query.dtype, device=query.device)
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    attention_kernel[(batch, kv_heads, slots)](
        query, key, value, keys, values, tables, lengths, chunk, partial, norms,
        arrivals(query.device), out, query.stride(0), query.stride(1), key.stride(0),
        key.stride(1), value.stride(0), value.stride(1), tables.stride(0), scale / math.log(2),
        group, padded, width, PAGE_TOKENS, 64, slots, kv_heads, num_stages=3)
    return out


def has_plain_attention(lm: nn.Module) -> bool:
    """Whether paged_attention computes what this model means: causal, over everything, no caps."""
    config = lm.config
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = {*(getattr(config, "layer_types", None) or ())} <= {"full_attention"}
    return bool(lm._supports_attention_backend and kinds and not window
                and not getattr(config, "attn_logit_softcapping", None))


def update_bytes(policy: "Policy", tokens: int) -> int:
    """GPU memory that an update on a row of that many tokens takes, an estimate that errs upwards.

    Checkpoints of every layer, one layer's working set, logits of HEAD_CHUNK positions, gradients
    and Adam's moments; at least 14 GiB, which the judge needs for its references; and a twentieth
    of the GPU for graphs, workspaces and fragments.
    """
    shape = policy.base.config
    inner = getattr(shape, "intermediate_size", 4 * shape.hidden_size)
    row = 2 * shape.num_hidden_layers * shape.hidden_size + 12 * inner
    adapter = sum(p.numel() for p in policy.trainable())
    update = row * tokens + 16 * HEAD_CHUNK * shape.vocab_size + 12 * adapter
    return max(update, 14 * 2**30) + torch.cuda.mem_get_info()[1] // 20


def paged_attention(module, query, key, value, attention_mask, scaling=None, engine=None, **_):
    """Attention over the engine's pages, for transformers' AttentionInterface.

    query is (B, heads, L, D): in prefill one sequence (B = 1, causal), in decoding one token
    (L = 1) of each of B sequences. New keys and values are written to their pages.
    """
    keys, values = engine.keys[module.layer_idx], engine.values[module.layer_idx]
    if engine.places is not None:  # (L,), where in the pool prefill writes
        for pool, new in ((keys, key), (values, value)):
            pool.flatten(0, 1)[engine.places] = new[0].transpose(0, 1)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    tables, lengths = engine.tables[: len(query)], engine.lengths[: len(query)]
    if engine.kernels:
        one = (x[:, :, 0] for x in (query, key, value))
        return decode_attention(*one, keys, values, tables, lengths, engine.chunk, scaling), None
    last, rows = (lengths - 1).clamp(min=0), torch.arange(len(query), device=query.device)
    pages = tables[rows, last // PAGE_TOKENS]
    for pool, new in ((keys, key), (values, value)):
        pool[pages, last % PAGE_TOKENS] = new[:, :, 0]
    longest = int(lengths.max())
    pages = tables[:, : -(-longest // PAGE_TOKENS)]
    key, value = (pool[pages].flatten(1, 2)[:, :longest].transpose(1, 2) for pool in (keys, values))
    mask = torch.arange(longest, device=query.device) < lengths[:, None]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None, None], scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor,
                  temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, log-probabilities): the first token whose cumulated probability exceeds its number.

    logits (B, V), uniforms (B,) in [0, 1). Blocks of 256 tokens are summed first, then one block is
    looked into: one pass over the vocabulary. DEPARTS: no top-p (a second-hand source has 0.95 for
    the paper): truncated sampling would bias the ratio of section 11.

    >>> sample_tokens(torch.tensor([[0.0, 0.0]]), torch.tensor([0.75]), 1.0)[0].tolist()
    [1]
    """
    logprobs, batch = torch.log_softmax(logits.float() / temperature, dim=-1), len(logits)
    blocks = nn.functional.pad(logprobs, (0, -logits.shape[1] % 256), value=-math.inf)
    blocks = blocks.exp().view(batch, -1, 256)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # (B, V / 256)
    targets = uniforms[:, None].to(ends) * ends[:, -1:]
    block = torch.searchsorted(ends, targets, right=True)
    block = torch.minimum(block, torch.searchsorted(ends, ends[:, -1:].contiguous()))
    block = block.clamp(max=ends.shape[1] - 1)  # a row of NaN, and above: rounding
    inside = blocks[torch.arange(batch, device=ends.device), block[:, 0]].double().cumsum(-1)
    targets = targets - ends.gather(1, block) + inside[:, -1:]
    token = torch.searchsorted(inside, targets, right=True)
    token = torch.minimum(token, torch.searchsorted(inside, inside[:, -1:].contiguous()))
    tokens = (block * 256 + token).clamp(max=logits.shape[1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


class Engine:
    """Continuous batching: add() queues a request, step() decodes one token of each active one.

    Keys and values live in a pool of pages; a sequence takes pages as it grows, and equal prompts
    share theirs. When the pool is empty the youngest sequence goes back to the queue and is
    computed again later. On a GPU one CUDA graph a batch size holds forward pass and sampling.
    """

    def __init__(self, policy: Policy, max_batch: int, temperature: float, max_tokens: int,
                 kv_gib: float = 0.0, trained: bool = True):
        transformers.AttentionInterface.register("kevin_pages", paged_attention)
        self.policy, self.temperature, self.device = policy, temperature, policy.lm.device
        self.max_batch, self.max_tokens, cuda = max_batch, max_tokens, self.device.type == "cuda"
        self.waiting: list[Request] = []
        self.active: list[Request] = []  # the row of a request in the batch is its index
        self.shared: dict[tuple, tuple[list[int], torch.Tensor]] = {}  # of prompts to come again
        self.paged, self.places, self.graphs = has_plain_attention(policy.base), None, {}
        if not self.paged:
            return
        shape, dtype = policy.base.config, next(policy.base.parameters()).dtype
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        self.kernels = cuda and triton is not None and width in (16, 32, 64, 128, 256)
        size = [shape.num_hidden_layers, 0, PAGE_TOKENS, shape.num_key_value_heads, width]
        longest = -(-max_tokens // PAGE_TOKENS)  # pages of one sequence
        size[1] = 1 + longest * max_batch
        if cuda:
            free = torch.cuda.mem_get_info()[0] - update_bytes(policy, max_tokens if trained else 0)
            free = kv_gib * 2**30 or free
            page_bytes = 2 * size[0] * math.prod(size[2:]) * dtype.itemsize
            size[1] = min(size[1], int(free // page_bytes))
            if size[1] < longest + 2:  # the page of unused rows, and one to spare
                raise UserError(f"only {max(0, size[1]) * PAGE_TOKENS} tokens of keys and values "
                                "fit beside the model: lower --max-new-tokens or set --kv-gib")
        self.keys, self.values = (torch.zeros(size, dtype=dtype, device=self.device) for _ in "kv")
        self.free, self.uses = list(range(size[1] - 1, 0, -1)), [0] * size[1]  # 0: for unused rows
        zeros = functools.partial(torch.zeros, device=self.device)
        self.tables, self.lengths = (zeros(n, dtype=torch.int32) for n in (
            (max_batch, longest + 1), (max_batch,)))  # a row's pages, and its tokens
        self.ids, self.uniforms = zeros(max_batch).long(), zeros(max_batch).double()
        self.chunk, self.stale = zeros(1).int(), True

    def __len__(self) -> int:
        return len(self.waiting) + len(self.active)

    def add(self, request: Request) -> None:
        """Queues a request."""
        if len(request.prompt_ids) + request.max_new_tokens > self.max_tokens:
            raise UserError("prompt and answer are longer than the engine's limit")
        self.waiting.append(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Admits waiting requests, decodes one token of each active one, returns the finished."""
        config, finished = self.policy.base.config, []
        before = config._attn_implementation
        if self.policy.training:  # asked first: to set thousands of modules takes 13 ms
            self.policy.eval()
        try:
            if self.paged:
                config._attn_implementation = "kevin_pages"
            for joined in self.policy.joined:
                joined.sampling = True
                if not self.active:  # a new rollout: the adapter may have changed
                    joined.refresh()
            with CLOCK("prefill"):
                while self.waiting and len(self.active) < self.max_batch and self._has_room():
                    finished += self._admit(self.waiting.pop(0))
            with CLOCK("decode"):
                finished += self._decode()
        finally:
            config._attn_implementation = before
            for joined in self.policy.joined:
                joined.sampling = False
        return finished

    def _extend(self, requests: list[Request], tokens, logprobs) -> list[Request]:
        """Appends a token to each request; the finished ones, whose pages are free again."""
        for request, token, logprob in zip(requests, tokens, logprobs):
            request.completion_ids.append(token)
            request.logprobs.append(logprob)
            full = len(request.completion_ids) >= request.max_new_tokens
            request.finish_reason = "stop" if token in self.policy.eos_ids else "length" * full
        finished = [request for request in requests if request.finish_reason]
        for request in finished:
            self._release(request)
        if finished:
            self.active, self.stale = [r for r in self.active if not r.finish_reason], True
        return finished

    def _release(self, request: Request) -> None:
        self._give_back(request.pages)
        request.pages, request.cache = [], None

    def _hold(self, pages: list[int]) -> list[int]:
        """The pages, with one more user each."""
        for page in pages:
            self.uses[page] += 1
        return pages

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.uses[page] -= 1
            if not self.uses[page]:
                self.free.append(page)

    def _take(self, count: int) -> list[int]:
        return self._hold([self.free.pop() for _ in range(count)])

    def _has_room(self) -> bool:
        """Whether the next request's pages fit, with SPARE_PAGES for each active one."""
        if not self.paged:
            return True
        request = self.waiting[0]
        needed = (len(request.prompt_ids) + len(request.completion_ids)) // PAGE_TOKENS + 1
        if not request.completion_ids and tuple(request.prompt_ids) in self.shared:
            needed = 1
        if needed + SPARE_PAGES * len(self.active) <= len(self.free):
            return True
        if not self.active:
            self._forget_prompts()
        return not self.active

    def _forget_prompts(self) -> None:
        for pages, _ in self.shared.values():
            self._give_back(pages)
        self.shared.clear()

    def _admit(self, request: Request) -> list[Request]:
        """Computes a request's prompt, or copies it from one that is the same; samples a token."""
        self.active.append(request)
        self.stale, key = True, tuple(request.prompt_ids)
        if not self.paged:
            return []
        if request.completion_ids or key not in self.shared:
            logits = self._prefill(request)
        else:
            pages, logits = self.shared[key]
            whole = pages[: len(key) // PAGE_TOKENS]  # these are never written again
            request.pages = self._hold(whole)
            if len(key) % PAGE_TOKENS:
                request.pages += self._take(1)
                for pool in (self.keys, self.values):
                    pool[:, request.pages[-1]] = pool[:, pages[len(key) // PAGE_TOKENS]]
        again = any(r.prompt_ids == request.prompt_ids for r in self.waiting)
        if not request.completion_ids and again and key not in self.shared:
            self.shared[key] = self._hold(list(request.pages)), logits
        elif key in self.shared and not again:
            self._give_back(self.shared.pop(key)[0])
        return self._sample(request, logits)

    def _sample(self, request: Request, logits: torch.Tensor) -> list[Request]:
        """Appends one request's next token."""
        uniforms = torch.tensor([request.draws.random()], device=self.device, dtype=torch.float64)
        sampled = sample_tokens(logits, uniforms, self.temperature)
        return self._extend([request], *(x.tolist() for x in sampled))

    def _prefill(self, request: Request) -> torch.Tensor:
        """Fills a request's pages with keys and values of its tokens; the next logits, (1, V)."""
        ids = request.prompt_ids + request.completion_ids
        padding = -len(ids) % PAGE_TOKENS if self.device.type == "cuda" else 0  # few kernel plans
        request.pages = self._take(-(-len(ids) // PAGE_TOKENS))
        row = torch.tensor([ids + [0] * padding], device=self.device)
        positions = torch.arange(row.shape[1], device=self.device)
        pages = torch.tensor(request.pages, device=self.device)
        self.places = pages[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        logits = self.policy.base(
            input_ids=row, position_ids=positions[None], use_cache=False, engine=self,
            logits_to_keep=torch.tensor([len(ids) - 1], device=self.device)).logits[:, 0]
        self.places = None
        return logits

    def _decode(self) -> list[Request]:
        """One more token for every active request."""
        if not self.paged:
            return [r for request in list(self.active) for r in self._decode_alone(request)]
        for request in list(self.active):
            length = len(request.prompt_ids) + len(request.completion_ids)
            if request in self.active and length > PAGE_TOKENS * len(request.pages):
                self._grow(request)
        if not self.active:
            return []
        graph, count = None, len(self.active)
        if self.kernels:
            size = next((n for n in BATCH_SIZES if n >= count), self.max_batch)
            graph, sampled = self._graph(min(size, self.max_batch))
        if self.stale:
            self._upload()
        uniforms = torch.tensor([r.draws.random() for r in self.active], dtype=torch.float64)
        self.uniforms[:count] = uniforms.to(self.device)
        if graph:
            graph.replay()
        else:
            sampled = self._forward(count)
        tokens, logprobs = sampled.tolist()
        return self._extend(list(self.active), map(int, tokens[:count]), logprobs)

    def _grow(self, request: Request) -> None:
        """A page for the request's next token; the youngest sequences make room for it."""
        if not self.free:
            self._forget_prompts()
        while not self.free and request in self.active:
            youngest = self.active.pop()
            self._release(youngest)
            self.waiting.insert(0, youngest)
        if request in self.active:
            request.pages += self._take(1)
        self.stale = True

    def _upload(self) -> None:
        """Sets the rows of the batch, after sequences came, went or took a page."""
        rows, count = self.active, len(self.active)
        tables = torch.zeros(self.tables.shape, dtype=torch.int32)
        for row, request in zip(tables, rows):
            row[: len(request.pages)] = torch.tensor(request.pages)
        self.tables.copy_(tables)
        self.lengths.zero_()
        self.lengths[:count] = torch.tensor(
            [len(r.prompt_ids) + len(r.completion_ids) for r in rows], dtype=torch.int32)
        self.ids[:count] = torch.tensor([r.completion_ids[-1] for r in rows])
        self.stale = False

    def _forward(self, size: int) -> torch.Tensor:
        """Next tokens and log-probabilities of the first rows, (2, size); the rows move on."""
        lengths = self.lengths[:size]
        if self.kernels:  # tokens a program: long sequences get more programs, up to the slots
            slots = split_slots(size, self.keys.shape[3])
            share = torch.maximum(lengths.sum() * 4 // (slots * size), lengths.max() // slots)
            self.chunk[0] = (share // 64 + 1).clamp(min=4) * 64
        positions = (lengths - 1).clamp(min=0)[:, None].long()
        logits = self.policy.base(input_ids=self.ids[:size, None], position_ids=positions,
                                  use_cache=False, engine=self, logits_to_keep=1).logits[:, -1]
        tokens, logprobs = sample_tokens(logits, self.uniforms[:size], self.temperature)
        self.ids[:size] = tokens
        lengths += (lengths > 0).int()
        return torch.stack([tokens.double(), logprobs.double()])

    def _graph(self, size: int) -> tuple:
        """The CUDA graph of a batch size and its output; captured when it is first needed."""
        if size not in self.graphs:
            self.lengths.zero_()  # nothing is written but to the unused page
            side, main = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self._forward(size), self._forward(size)
            main.wait_stream(side)
            pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = self._forward(size)
            self.graphs[size], self.stale = (graph, output), True
        return self.graphs[size]

    def _decode_alone(self, request: Request) -> list[Request]:
        """One token of one request through transformers' own cache: any causal model, slowly."""
        if request.cache is None:
            request.cache = transformers.DynamicCache(config=self.policy.base.config)
        ids = (request.prompt_ids + request.completion_ids)[request.cache.get_seq_length() :]
        logits = self.policy.base(input_ids=torch.tensor([ids], device=self.device),
                                  past_key_values=request.cache, use_cache=True).logits[:, -1]
        return self._sample(request, logits)


class Server:
    """A model behind an OpenAI-compatible server, in the place of an engine and its policy.

    No tokens are known: bytes of the text stand for them, a quarter of them in a prompt. Requests
    run in parallel; 429, 5xx and broken connections are tried again. The key is OPENAI_API_KEY.
    """

    # a server does not name them; these are Qwen's
    control_tokens = ("<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")

    def __init__(self, url: str, config: Config):
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.client = huggingface_hub.InferenceClient(
            base_url=url, api_key=key, timeout=SERVER_TIMEOUT_S)
        self.url, self.config, self.pool = url, config, ThreadPoolExecutor(config.max_batch)
        self.running: dict[Future, Request] = {}
        self.lock = threading.Lock()
        self.used = collections.Counter(prompt_tokens=0, completion_tokens=0)  # by its count
        # servers cut the distribution at the model's top_k and top_p unless told not to; some
        # refuse top_k, and OpenAI's reasoning models everything: then the next of these is tried
        plain = {"temperature": config.temperature, "top_p": 1.0}
        self.sampling = [plain | {"extra_body": {"top_k": -1}}, plain, {}]

    def __len__(self) -> int:
        return len(self.running)

    def render(self, messages: list[dict]) -> tuple[str, list[int]]:
        """The messages as JSON, and a quarter of its bytes for the prompt's limit."""
        text = json.dumps(messages)
        return text, list(text.encode()[::4])

    def decode(self, completion_ids: list[int]) -> str:
        """The text whose bytes these are."""
        return bytes(completion_ids).decode()

    def add(self, request: Request) -> None:
        """Sends a request."""
        arguments = (json.loads(request.prompt), request.max_new_tokens, request.draws)
        self.running[self.pool.submit(self.ask, *arguments)] = request

    def step(self) -> list[Request]:
        """Waits up to a second for answers, and returns the finished requests."""
        finished = []
        for future in wait(self.running, timeout=1, return_when=FIRST_COMPLETED).done:
            request = self.running.pop(future)
            text, request.finish_reason = future.result()
            request.completion_ids = list(text.encode(errors="replace"))
            finished.append(request)
        return finished

    def ask(self, messages: list[dict], max_new_tokens: int, draws: random.Random):
        """(answer with its thought closed by </think>, finish reason); UserError without one."""
        seed = draws.getrandbits(31)
        for attempt in range(SERVER_ATTEMPTS):
            way = self.sampling[0]
            limit = {"max_tokens": max_new_tokens, "seed": seed} if way else {
                "extra_body": {"max_completion_tokens": max_new_tokens}}
            try:
                return self.answer(self.client.chat_completion(
                    messages, model=self.config.model, **limit, **way))
            except (huggingface_hub.errors.HTTPError, OSError, ValueError, IndexError) as e:
                response = getattr(e, "response", None)
                status, fault = getattr(response, "status_code", 500), e
            if status in (400, 422) and way:
                with self.lock:  # others may have been refused the same at the same time
                    if self.sampling[0] is way:
                        self.sampling = self.sampling[1:]
                continue
            if status != 429 and status < 500:
                break
            time.sleep(SERVER_PAUSE_S * 2**attempt * (1 + random.random()))
        words = " ".join((getattr(response, "text", "") or str(fault)).split())
        raise UserError(f"{self.url} gave no answer: {words[:500]}")

    def answer(self, found) -> tuple[str, str]:
        """Text and finish reason of a response; an answer cut within its thought stays unclosed."""
        choice = found.choices[0]
        text, message = (choice.message.content or "").strip(), choice.message
        thought = message.reasoning or getattr(message, "reasoning_content", None) or ""
        with self.lock:
            self.used.update({kind: getattr(found.usage, kind, 0) or 0 for kind in self.used})
        cut = choice.finish_reason == "length"
        if thought:
            text = f"{thought}\n</think>\n{text}" if text else thought
        elif "</think>" not in text and not cut:  # if it was cut, it may all be thought
            text = f"</think>\n{text}"
        return text.removeprefix("<think>").lstrip(), "length" if cut else "stop"


# ---- 10. Rollout: turns of trajectories, decoding and judging interleaved (paper 4, C) -----------

FAULTS_IN_A_ROW = 16  # the machine is broken: better to stop, and --resume once it is mended


def judged_turn(request: Request, text: str, verdict: Verdict, config: Config) -> Turn:
    """The next turn of the request's trajectory, from its answer and the verdict on that."""
    owner = request.owner
    _, kernel, summary = parse_response(text)  # GUESS: one complete in a cut answer counts
    return Turn(owner.task.id, owner.step, owner.index, len(owner.turns), request.prompt, text,
                request.prompt_ids, request.completion_ids, request.logprobs,
                request.finish_reason, kernel, summary, verdict, feedback(verdict),
                kernel_score(verdict, config.correct_weight))


def rollout(engine, judge, chat, trajectories: list[Trajectory], config: Config,
            max_new_tokens: int, on_turn) -> None:
    """Extends every trajectory to config.turns turns in one event loop, without a barrier (4, C).

    Finished answers compile in the background while others decode. When enough are built, or
    nothing decodes, decoding pauses, the judge has the device to itself, and the next prompts join
    the batch. on_turn(turn) is called for each new turn and returns what is to be kept of it. A
    kernel judged before in this rollout keeps its verdict (GUESS): timing it again only adds noise.
    """
    device, faults = (judge.device, judge.device_name), 0
    building: dict[Future, Request] = {}
    verdicts: dict[tuple[str, str], Verdict] = {}

    def ask(trajectory):
        turn = len(trajectory.turns)
        if turn < config.turns:
            prompt, ids = build_prompt(trajectory.task, trajectory.turns, device, chat,
                                       config.max_prompt_tokens)
            place = trajectory.step, trajectory.task.id, trajectory.index, turn
            draws = random.Random(stable_seed(config.seed, *place))
            engine.add(Request(trajectory, prompt, ids, max_new_tokens, draws))

    def settle(request, verdict):
        nonlocal faults
        if verdict.outcome not in ("no_code", "hack"):  # these need no machine
            faults = faults + 1 if verdict.outcome == "judge_error" else 0
        if faults == FAULTS_IN_A_ROW:
            raise JudgeFault(f"the judge failed {faults} times in a row: {verdict.message}")
        text = chat.decode(request.completion_ids)
        request.owner.turns.append(on_turn(judged_turn(request, text, verdict, config)))
        ask(request.owner)

    for trajectory in trajectories:
        ask(trajectory)
    while len(engine) or building:
        for request in engine.step() if len(engine) else []:
            kernel = parse_response(chat.decode(request.completion_ids))[1]
            if kernel is None:
                settle(request, Verdict("no_code", device=judge.device_name))
            else:
                building[judge.submit(kernel)] = request
        if building and not len(engine):
            with CLOCK("compile_wait"):
                wait(building, return_when=FIRST_COMPLETED)
        ready = [future for future in building if future.done()]
        if len(engine) and len(ready) < (len(engine) + len(building)) / 4:
            continue
        for future in ready:
            request, built = building.pop(future), future.result()
            if isinstance(built, Verdict):
                settle(request, built)
                continue
            task, key = request.owner.task, (request.owner.task.id, built.code)
            if key not in verdicts or verdicts[key].outcome == "judge_error":
                with CLOCK("judge"):
                    verdicts[key] = judge.check(task, built)
            settle(request, verdicts[key])


# ---- 11. GRPO loss and update (paper 3.3, 4.2, 6.1) ----------------------------------------------


def policy_loss(logprobs, old_logprobs, advantage: float, clip_low: float = 0.2,
                clip_high: float = 0.28, kl: float = 0.0,
                ref_logprobs=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss summed over one sample's tokens, share of them clipped, mean KL term) (3.3, 6.1).

    -sum min(r A, clip(r, 1 - low, 1 + high) A) + kl * sum(exp(d) - d - 1), r = exp(logp - old) and
    d = ref - logp, all (T,). The caller divides by N * L.

    >>> logp = torch.tensor([-1.0, -2.0])
    >>> policy_loss(logp, logp, 2.0)[0].item(), policy_loss(logp + 1, logp, 2.0)[1].item()
    (-4.0, 1.0)
    """
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()  # an overflow would be inf * 0
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).sum()
    divergence = torch.zeros_like(loss)
    if kl:
        difference = (ref_logprobs - logprobs).clamp(-20, 20)
        divergence = (difference.exp() - difference - 1).sum()
    share = (clipped * advantage < ratio * advantage).float().mean()
    return loss + kl * divergence, share.detach(), divergence.detach() / len(logprobs)


@torch.no_grad()
def store_logprobs(policy: Policy, turns: list[Turn], config: Config) -> list[tuple]:
    """(turn, old log-probabilities, adapter-free ones if KL is used) of turns that matter."""
    samples = []
    for turn in turns:
        if turn.advantage or config.kl:
            arguments, reference = (turn.prompt_ids, turn.completion_ids, config.temperature), None
            if config.kl:
                with policy.lm.disable_adapter():
                    reference = policy(*arguments)
            samples.append((turn, policy(*arguments), reference))
    return samples


def update(policy: Policy, optimizer, samples: list[tuple], count: int, config: Config,
           reduce) -> dict[str, float]:
    """One gradient step on `count` samples, of which `samples` are this process's.

    Losses are divided by count * length_normalizer, constants of the update (PAPER: 6.1), so the
    gradient does not depend on how samples are spread or skipped. reduce(tensor) sums over the
    processes: one flat all-reduce, also of a process without samples.
    """
    parameters, totals = policy.trainable(), torch.zeros(4, dtype=torch.float64)
    policy.train()
    with CLOCK("forward_backward"):
        for turn, old, reference in samples:
            logprobs = policy(turn.prompt_ids, turn.completion_ids, config.temperature)
            loss, *shares = policy_loss(logprobs, old, turn.advantage, config.clip_low,
                                        config.clip_high, config.kl, reference)
            loss = loss / (count * config.length_normalizer)
            loss.backward()
            numbers = [loss.item(), *(share.item() for share in shares), 1.0]
            totals += torch.tensor(numbers, dtype=torch.float64)
    policy.eval()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    with CLOCK("wait_ranks"):
        flat = reduce(torch.cat([g.flatten() for g in grads]))
        loss, clipped, divergence, seen = reduce(totals.to(flat.device)).tolist()
    with CLOCK("optimizer"):
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            parameter.grad = part.view_as(parameter).clone()
        norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm).item()
        sound = math.isfinite(loss) and math.isfinite(norm)
        if sound:
            optimizer.step()
        else:  # the same on every process: both numbers are sums over them
            print(f"update skipped: loss {loss}, gradient norm {norm}", file=sys.stderr)
        optimizer.zero_grad(set_to_none=True)
    return {"policy/loss": loss, "policy/clip_fraction": clipped / max(seen, 1.0),
            "policy/kl": divergence / max(seen, 1.0), "policy/grad_norm": norm,
            "policy/skipped": float(not sound)}


# ---- 12. Training (paper 4.4, 6.1) ---------------------------------------------------------------


def mean(values) -> float:
    """Arithmetic mean; 0 of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def grade(turns: list[Turn], config: Config) -> list[Turn]:
    """The turns of one step with returns and advantages, in order of task, trajectory and turn."""
    graded, ordered = [], sorted(turns, key=lambda t: t.key)
    for _, group in itertools.groupby(ordered, lambda t: t.task):
        group, returns = list(group), []
        for _, trajectory in itertools.groupby(group, lambda t: t.trajectory):
            scores = [t.score for t in trajectory]
            discounted = discounted_returns(scores, config.gamma, config.aggregate)
            returns += [None if None in scores[i:] else r for i, r in enumerate(discounted)]
        advantages = group_advantages(returns, config.scale == "group")
        graded += [replace(t, return_=r, advantage=a)
                   for t, r, a in zip(group, returns, advantages)]
    if config.scale == "batch":
        spread = math.sqrt(mean(t.advantage**2 for t in graded if t.return_ is not None)) or 1.0
        graded = [replace(t, advantage=t.advantage / spread) for t in graded]
    return graded


def is_junk(text: str) -> bool:
    """Whether a text repeats itself or is noise, by how far zlib shrinks it (GUESS; 6.1).

    Answers of models, thought and code, shrink to 0.2 to 0.5; a loop to less than 0.1, words from
    all languages at random to more than 0.65. Shorter than 1,000 bytes: False.

    >>> is_junk("wait, " * 500), is_junk("short")
    (True, False)
    """
    raw = text.encode(errors="replace")
    return len(raw) >= 1000 and not 0.1 <= len(zlib.compress(raw)) / len(raw) <= 0.65


def step_metrics(turns: list[Turn]) -> dict[str, float]:
    """Scores, outcomes, and per turn index the health of the answers (6.1)."""
    scores = [t.score for t in turns if t.score is not None]
    correct = [t.verdict.speedup for t in turns if t.verdict.outcome == "correct"]
    junk = {t.key: is_junk(t.completion) for t in turns}
    metrics = {"score/mean": mean(scores), "score/best": max(scores, default=0.0),
               "return/mean": mean(t.return_ for t in turns if t.return_ is not None),
               "advantage/max": max(abs(t.advantage) for t in turns),
               "advantage/zero": mean(t.advantage == 0 for t in turns),
               "kernel/correct": len(correct) / len(turns), "kernel/speedup": mean(correct),
               "length/completion": mean(len(t.completion_ids) for t in turns),
               "health/junk": mean(junk.values())}
    for outcome in OUTCOMES:
        metrics[f"outcome/{outcome}"] = mean(t.verdict.outcome == outcome for t in turns)
    for index in sorted({t.turn for t in turns}):
        same = [t for t in turns if t.turn == index]
        okay = [t.completion.lstrip().startswith("Okay,") for t in same]
        metrics[f"health/not_okay/{index}"] = 1 - mean(okay)
        metrics[f"health/junk/{index}"] = mean(junk[t.key] for t in same)
        metrics[f"health/cut/{index}"] = mean(t.finish_reason == "length" for t in same)
        metrics[f"score/turn/{index}"] = mean(t.score for t in same if t.score is not None)
    return metrics


def stored_config(run: Path, command: str = "") -> dict:
    """The configuration of a run folder; UserError if it is none, or not this command's."""
    if not (run / "config.json").exists():
        raise UserError(f"{run} holds no run (config.json)")
    try:
        stored = json.loads((run / "config.json").read_text())
        was = stored.pop("command", command)
        Config(**stored)
    except (ValueError, TypeError, AttributeError) as e:
        raise UserError(f"{run}/config.json is damaged or another version's: {e}") from None
    if command and was != command:
        raise UserError(f"{run} is a run of `{was}`, not of `{command}`")
    return stored


MACHINE = """out resume steps cache build_jobs max_batch kv_gib unsafe
    stop_on_junk""".split()  # may differ when a run is gone on with


def open_run(config: Config, command: str) -> Path:
    """The run folder, locked, with config.json, this source, and environment.json."""
    run = Path(config.resume or config.out or time.strftime(f"runs/{command}-%Y%m%d-%H%M%S"))
    there = stored_config(run, command) if (run / "config.json").exists() else asdict(config)
    for name, value in asdict(config).items():
        if name not in MACHINE and there.get(name) != value:
            raise UserError(f"run folder {run} is another configuration's: {name} is "
                            f"{there.get(name)!r} there and {value!r} here")
    run.mkdir(parents=True, exist_ok=True)
    try:  # held until this process ends
        fcntl.lockf(os.open(run / "lock", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"run folder {run} is in use by another process") from None
    packages, driver = ("transformers", "peft", "accelerate"), Path("/proc/driver/nvidia/version")
    git = shutil.which("git") and subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    facts = {name: importlib.metadata.version(name) for name in packages} | {
        "python": sys.version, "torch": torch.__version__, "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver.read_text().split("\n")[0] if driver.exists() else None,
        "cpu": cpu_name(), "machine": platform.platform(), "cores": os.cpu_count(),
        "commit": git.stdout.strip() if git else None, "command": sys.argv}
    write_whole(run / "environment.json", json.dumps(facts, indent=1).encode())
    stored = json.dumps({"command": command} | asdict(config), indent=1)
    write_whole(run / "config.json", stored.encode())
    write_whole(run / "kevin.py", Path(__file__).read_bytes())
    return run


def read_lines(path: Path):
    """Lines of a log, one by one; a torn last line (the process was killed in it) is ignored."""
    if path.exists():
        with open(path, "rb") as file:
            yield from (line.decode() for line in file if line.endswith(b"\n"))


def read_turns(path: Path):
    """Turns of a log, one by one; where a key occurs twice, its readers let the last count."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield Turn.from_json(line)
        except (ValueError, TypeError, KeyError) as e:
            raise UserError(f"{path}:{number}: not a turn: {e!r}") from None


def latest_turns(logs) -> dict[tuple, Turn]:
    """Turns by key: the first of each, but one that the judge failed on gives way to a later one.

    What followed the fault in its trajectory, an answer to other feedback, leaves with it.
    """
    found: dict[tuple, Turn] = {}
    gone = []
    for turn in itertools.chain(*logs):
        known = found.get(turn.key)
        if known and known.verdict.outcome != "judge_error" or (
                turn.key, turn.kernel, turn.verdict) in gone:  # a second log may repeat it
            continue
        for number in itertools.count(turn.turn + 1) if known else ():
            later = found.pop((*turn.key[:3], number), None)
            if later is None:
                break
            gone.append((later.key, later.kernel, later.verdict))
        found[turn.key] = turn
    return found


def append_lines(path: Path, lines: list[str]) -> None:
    """Appends whole lines and flushes them to the disk, after cutting a torn last line off."""
    with open(path, "ab+") as file:
        size = file.tell()
        file.seek(max(0, size - 1))
        if file.read() not in (b"", b"\n"):
            file.seek(max(0, size - (1 << 26)))
            file.truncate(size - len(file.read().rpartition(b"\n")[2]))
        file.write("".join(line + "\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())


def checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted(folders, key=lambda p: int(p.name.removeprefix("step-")))


def save_checkpoint(run: Path, policy: Policy, optimizer, schedule, step: int) -> None:
    """checkpoints/step-N, whole or not at all; the previous one is kept beside it."""
    partial = run / "checkpoints/partial"
    shutil.rmtree(partial, ignore_errors=True)
    policy.lm.save_pretrained(partial)
    torch.save({"step": step, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
                "schedule": schedule.state_dict()}, partial / "state.pt")
    partial.rename(run / f"checkpoints/step-{step}")
    for old in checkpoints(run)[:-2]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, policy: Policy, optimizer, schedule) -> int:
    """Restores adapter, optimiser, schedule and random state; the next step."""
    weights = peft.utils.load_peft_weights(folder, device="cpu")
    peft.set_peft_model_state_dict(policy.lm, weights)
    state = torch.load(folder / "state.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["rng"])
    return state["step"]


def chosen_tasks(config: Config) -> list[Task]:
    """The tasks of --tasks: the tiny ones with --tiny, else all others."""
    tasks = [t for t in load_tasks(config.tasks) if (t.level == "tiny") == config.tiny]
    if not tasks or config.tiny and not all(t.answers for t in tasks):
        kind = "tiny task with example answers" if config.tiny else "full-size task"
        raise UserError(f"{config.tasks} holds no {kind}")
    return tasks


def pick_tasks(tasks: list[Task], count: int, step: int, seed: int) -> list[Task]:
    """The tasks of a step, the same on every process: shuffled passes over all tasks.

    Within a pass the levels are interleaved, so that a step mixes easy and hard (PAPER: 6.3); what
    does not fill a step is left out of the pass (PAPER: its code).
    """
    epoch, place = divmod(step, max(1, len(tasks) // count))
    order = []
    for level in sorted({str(t.level) for t in tasks}):
        members = [t for t in tasks if str(t.level) == level]
        random.Random(stable_seed(seed, "tasks", epoch, level)).shuffle(members)
        order += [((i + 0.5) / len(members), level, t) for i, t in enumerate(members)]
    order.sort(key=lambda row: row[:2])
    return [task for _, _, task in order[place * count : (place + 1) * count]]


def train_step(policy: Policy, optimizer, schedule, turns: list[Turn], step: int, config: Config,
               accelerator) -> dict[str, float]:
    """The updates of a step on this process's share of the graded turns; the last one's metrics."""
    order = list(turns)
    random.Random(stable_seed(config.seed, "split", step)).shuffle(order)
    parts = [order[i :: config.updates_per_step] for i in range(config.updates_per_step)]
    shares, metrics = [], {}
    for part in parts:  # GUESS: halves of the batch, not two passes; each dealt in order of length
        part.sort(key=lambda t: len(t.prompt_ids) + len(t.completion_ids))
        mine = part[accelerator.process_index :: accelerator.num_processes]
        # PAPER: 3.3, old log-probs before the first update; later ones are off-policy
        with CLOCK("old_logprobs"):
            shares.append(store_logprobs(policy, mine, config))
    skipped = rate = limited = 0.0
    for part, share in zip(parts, shares):
        rate = schedule.get_last_lr()[0]
        metrics = update(policy, optimizer, share, len(part), config, accelerator.reduce)
        skipped += metrics.pop("policy/skipped", 0.0)
        limited += metrics.get("policy/grad_norm", 0.0) > config.max_grad_norm
        schedule.step()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the judge's workers need it
    gaps = [(old.cpu() - torch.tensor(turn.sampling_logprobs)).abs().mean().item()
            for share in shares for turn, old, _ in share]
    return metrics | {"policy/sampling_gap": mean(gaps), "policy/learning_rate": rate,
                      "policy/skipped_updates": skipped, "policy/limited_updates": limited}


def keep_best(group: list[Trajectory], beam: int) -> list[Trajectory]:
    """Beam search's selection: a task's `beam` trajectories with the fastest kernels, copied."""
    kept = []
    for _, same in itertools.groupby(group, lambda t: t.task.id):
        ranked = sorted(same, key=lambda t: -max(u.verdict.speedup for u in t.turns))
        sources = itertools.islice(itertools.cycle(ranked[:beam]), len(ranked))
        kept += [replace(t, index=i, turns=list(t.turns)) for i, t in enumerate(sources)]
    return kept


def run_rollout(engine, judge, policy, tasks: list[Task], step: int, config: Config, limit: int,
                recorded: dict, log: Path, title: str, keep=lambda turn: turn) -> list[Turn]:
    """All turns of some tasks in a step: the recorded ones, then the rest, logged one by one.

    With config.beam the trajectories are selected after every turn, and all turns of what is left
    at the end are returned, under the last trajectory's number.
    """
    group = [Trajectory(task, step, i) for task in tasks for i in range(config.trajectories)]
    total = len(group) * config.turns
    with accelerate.utils.tqdm(total=total, desc=title, unit="turn", leave=False) as bar:

        def on_turn(turn):
            append_lines(log, [turn.to_json()])
            bar.update()
            return keep(turn)

        for until in range(1, config.turns + 1) if config.beam else [config.turns]:
            for trajectory in group:
                place = step, trajectory.task.id, trajectory.index
                for turn in range(len(trajectory.turns), until):
                    found = recorded.get((*place, turn))
                    if found is None or found.verdict.outcome == "judge_error":
                        break
                    trajectory.turns.append(found)
                    bar.update()
            rollout(engine, judge, policy, group, replace(config, turns=until), limit, on_turn)
            if config.beam and until < config.turns:
                group = keep_best(group, config.beam)
    return [replace(turn, trajectory=t.index) for t in group for turn in t.turns]


def train(config: Config) -> None:
    """Multi-turn GRPO: rollouts, scores, returns, advantages, two updates, checkpoint, again.

    Each process samples its own tasks and logs unfinished turns to pending/; the main process alone
    writes turns.jsonl, metrics.jsonl and checkpoints. A resumed run takes up every recorded turn
    but those that the judge failed on.
    """
    # ranks finish rollouts minutes apart, and the default limit of 10 minutes would end the run
    patience = accelerate.InitProcessGroupKwargs(timeout=timedelta(hours=6))
    accelerator = accelerate.Accelerator(cpu=config.tiny, kwargs_handlers=[patience])
    kind = accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise UserError(f"{kind} shards the model; here every process holds it whole")
    main, barrier = accelerator.is_main_process, accelerator.wait_for_everyone
    rank, world = accelerator.process_index, accelerator.num_processes
    tasks = chosen_tasks(config)
    policy = None if config.tiny else load_policy(config)
    run = Path(accelerate.utils.gather_object([str(open_run(config, "train"))] if main else [])[0])
    policy = policy or tiny_policy(run, tasks, config, main, barrier)
    optimizer = torch.optim.AdamW(policy.trainable(), lr=config.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # the first update moves something, too
        optimizer, lambda update: min(1.0, (update + 1) / max(1, config.warmup_updates)))
    found = checkpoints(run)
    first = load_checkpoint(found[-1], policy, optimizer, schedule) if found else 0
    logs = [run / "turns.jsonl", *sorted((run / "pending").glob("*"))]
    recorded = latest_turns((t for t in read_turns(log) if t.step >= first) for log in logs)
    lines = map(json.loads, read_lines(run / "metrics.jsonl"))
    logged = {line["step"] for line in lines if "time/step" in line}  # not one stopped for junk
    tracker = None
    if main and importlib.util.find_spec("tensorboard"):
        tracker = accelerate.tracking.TensorBoardTracker("tensorboard", run)
        tracker.start()
    barrier()  # everyone has read before anyone writes
    with Judge("cpu" if config.tiny else "cuda", config.cache, config.build_jobs,
               config.unsafe) as judge:
        if main:
            (run / "pending").mkdir(exist_ok=True)
            write_whole(run / "sandbox.json", json.dumps(judge.layers).encode())
        barrier()
        engine = Engine(policy, config.max_batch, config.temperature, config.max_prompt_tokens
                        + max(config.max_new_tokens, config.late_new_tokens), config.kv_gib)
        CLOCK.lap()
        for step in range(first, config.steps):
            late = step >= config.late_step  # PAPER: 4.4, longer answers late
            limit = config.late_new_tokens if late else config.max_new_tokens
            judge.baselines.clear()  # eager is timed anew: a GPU's clocks drift
            mine = pick_tasks(tasks, config.tasks_per_step, step, config.seed)[rank::world]
            turns = run_rollout(engine, judge, policy, mine, step, config, limit, recorded,
                                run / f"pending/rank-{rank}", f"step {step + 1}/{config.steps}")
            with CLOCK("wait_ranks"):
                turns = grade(accelerate.utils.gather_object(turns), config)
            metrics = {"step": step, **step_metrics(turns)}
            if main:
                fresh = [t.to_json() for t in turns if t != recorded.get(t.key)]
                append_lines(run / "turns.jsonl", fresh)
            if config.stop_on_junk and metrics["health/junk"] >= config.stop_on_junk:
                if main:
                    append_lines(run / "metrics.jsonl", [json.dumps(metrics)])
                raise UserError(f"step {step + 1}: {metrics['health/junk']:.0%} of the answers are "
                                f"junk, see `show {run}`; the last checkpoint is from before them")
            metrics |= train_step(policy, optimizer, schedule, turns, step, config, accelerator)
            seconds = CLOCK.lap()  # of this process; a checkpoint's are in the next step
            metrics |= {f"time/{phase}": s for phase, s in seconds.items()}
            metrics["time/step"] = sum(seconds.values())
            if main:
                append_lines(run / "metrics.jsonl", [json.dumps(metrics)] * (step not in logged))
                with CLOCK("checkpoint"):
                    save_checkpoint(run, policy, optimizer, schedule, step + 1)
                for log in (run / "pending").glob("*"):
                    log.unlink()
                print_step(metrics, step == first)
                if tracker:
                    tracker.log(metrics, step=step)
            barrier()
    if main:
        print(f"run folder: {run}")
    accelerator.end_training()  # or threads of the process group may abort the exit


def outcome_shares(shares: dict[str, float]) -> str:
    """What occurred: "hack 25%, correct 75%"."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share)


def print_step(metrics: dict, header: bool) -> None:
    """One line of training's table: step, score, correct, speedup, outcomes."""
    if header:
        print(f"{'step':>4} {'score':>6} {'correct':>7} {'speedup':>7}  outcomes")
    outcomes = outcome_shares({name: metrics["outcome/" + name] for name in OUTCOMES})
    print(f"{metrics['step'] + 1:>4} {metrics['score/mean']:>6.2f} "
          f"{metrics['kernel/correct']:>7.0%} {metrics['kernel/speedup']:>6.2f}x  {outcomes}",
          flush=True)


# ---- 13. Evaluation and audit (paper 5) ----------------------------------------------------------


def reference_ms(task: Task, device: str, compiled: bool = False) -> float:
    """A reference program's median of 10 calls after 3 more, by PyTorch eager or compiled."""
    get_inputs, model, _ = reference_models(task.code, 1, device)
    inputs, times = seeded_inputs(get_inputs, 1, device), []
    model = torch.compile(model) if compiled else model
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if device == "cuda" else None
    with torch.no_grad():
        for _ in range(13):
            if device == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                start.record()
                model(*inputs)
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end))
            else:
                start = time.perf_counter()
                model(*inputs)
                times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def against_compiled(turns: list[Turn], ms: dict[str, float]) -> list[Turn]:
    """The turns with their speedups over torch.compile's ms of a task instead of PyTorch eager."""
    return [replace(t, verdict=replace(t.verdict, speedup=ms[t.task] / t.verdict.runtime_ms))
            if t.verdict.outcome == "correct" else t for t in turns]


MEASURES = {"correct": lambda s: float(s > 0), "speedup": float, "fast1": lambda s: float(s >= 1),
            "fast1.5": lambda s: float(s >= 1.5)}
COLUMNS = [f"{measure}/{kind}" for measure in MEASURES for kind in ("best", "avg")]
PAPER_ROWS = {name: dict(zip(COLUMNS, row)) for name, row in {
    # PAPER: Table 1, its own 100 tasks and H200s; shares, and speedups over eager
    "Kevin-32B": (0.82, 0.46, 1.10, 0.40, 0.43, 0.15, 0.20, 0.06),
    "single-turn RL": (0.82, 0.45, 0.85, 0.35, 0.43, 0.16, 0.16, 0.04),
    "QwQ-32B": (0.56, 0.11, 0.53, 0.08, 0.23, 0.03, 0.10, 0.01),
    "o4-mini": (0.38, 0.22, 0.78, 0.27, 0.21, 0.07, 0.13, 0.06),
    "o3-mini": (0.27, 0.08, 0.30, 0.08, 0.09, 0.02, 0.04, 0.02)}.items()}


def table_cells(row: dict[str, float]) -> dict[str, str]:
    """The columns of the paper's tables that a row has, speedups as 1.23x and shares as 45%."""
    return {name: f"{row[name]:.2f}x" if "speedup" in name else f"{row[name]:.0%}"
            for name in COLUMNS if name in row}


def best_speedups(turns: list[Turn], until: float = math.inf) -> dict[str, list[float]]:
    """A task's trajectories' speedups: the fastest correct kernel before turn `until`, or 0 (5)."""
    tasks: dict[str, dict[int, float]] = {}
    for turn in turns:
        if turn.verdict.outcome == "judge_error":  # says nothing of the kernel
            continue
        best = tasks.setdefault(turn.task, {})
        speedup = turn.verdict.speedup if turn.turn < until else 0.0
        best[turn.trajectory] = max(best.get(turn.trajectory, 0.0), speedup)
    return {task: list(best.values()) for task, best in tasks.items()}


def best_at_k(values: list[float], k: int) -> float:
    """Expected maximum of k of the n values, drawn without replacement: unbiased best@k (5).

    >>> best_at_k([1.0, 0.0, 2.0], 1), best_at_k([1.0, 0.0, 2.0], 3)
    (1.0, 2.0)
    """
    weighted = (math.comb(i, k - 1) * value for i, value in enumerate(sorted(values)))
    return sum(weighted) / math.comb(len(values), k)


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the mean over tasks, by 2,000 bootstrap samples from a fixed seed."""
    draws = random.Random(0)
    means = sorted(statistics.fmean(draws.choices(values, k=len(values))) for _ in range(2000))
    return means[50], means[1949]


def evaluation_row(turns: list[Turn]) -> dict[str, float]:
    """The paper's Table 1 (5): best@k and avg@k of MEASURES, mean over tasks, with intervals."""
    tasks, row = best_speedups(turns), {}
    if not tasks:
        raise UserError("the judge failed on every turn; --resume RUN judges them again")
    for name, measure in MEASURES.items():
        values = [[measure(s) for s in best] for best in tasks.values()]
        for kind, over in (("best", max), ("avg", mean)):
            column = [over(v) for v in values]
            row[f"{name}/{kind}"] = mean(column)
            row[f"{name}/{kind}/low"], row[f"{name}/{kind}/high"] = interval(column)
    solved = [math.log(max(best)) for best in tasks.values() if max(best) > 0]
    return row | {"speedup/geometric": math.exp(mean(solved)) if solved else 0.0,
                  "score": mean(t.score for t in turns if t.score is not None)}


def evaluation_results(turns: list[Turn], tasks: list[Task], name: str) -> dict[str, dict]:
    """rows (all, by level and source), curves by turn and by k (Figures 5, 6), outcomes by turn."""
    rows = {name: evaluation_row(turns)}
    levels = {f"level {t.level}": {u.id for u in tasks if u.level == t.level} for t in tasks}
    if len(levels) > 2:  # the paper's two sources: new tasks, and those held out of levels 1 and 2
        levels["held out"] = {t.id for t in tasks if t.level in (1, 2)}
    for level, ids in levels.items() if len(levels) > 1 else ():
        rows[f"{name}, {level}"] = evaluation_row([t for t in turns if t.task in ids])
    length = max(t.turn for t in turns) + 1
    by_turn = [best_speedups(turns, n + 1).values() for n in range(length)]
    tasks_best = best_speedups(turns)
    values = tasks_best.values()
    by_k = [mean(best_at_k(v, k) for v in values) for k in range(1, min(map(len, values)) + 1)]
    mix = [[t.verdict.outcome for t in turns if t.turn == n] for n in range(length)]
    return {"rows": rows, "by_k": {name: by_k}, "speedups": {name: tasks_best},
            "by_turn": {name: [mean(map(max, found)) for found in by_turn]},
            "outcomes": {name: [{o: mean(x == o for x in same) for o in OUTCOMES if o in same}
                                for same in mix]}}


def print_evaluation(results: dict, k: int, paper: bool) -> None:
    """Table 1's columns, the paper's own rows beside them, and the curves."""
    width = max(14, *map(len, results["rows"]))
    print(f"{'':{width}} {'correct':^15} {'speedup':^15} {'fast1':^15} {'fast1.5':^15}  mean  geom."
          f"\n{'':{width}}" + f" {f'best@{k}':>7} {f'avg@{k}':>7}" * 4 + "  score  mean")
    for name, row in (results["rows"] | (PAPER_ROWS if paper else {})).items():
        cells = [f"{cell:>7}" for cell in table_cells(row).values()]
        more = "  (paper)"
        if "score" in row:
            more = f"{row['score']:>6.2f} {row['speedup/geometric']:>5.2f}x"
        print(f"{name:{width}} {' '.join(cells)} {more}")
    for name, row in results["rows"].items():
        print(f"{name}: speedup best@{k} {row['speedup/best']:.2f}, 95 % interval over tasks "
              f"{row['speedup/best/low']:.2f} to {row['speedup/best/high']:.2f}")
    for title, key in (("by turn", "by_turn"), ("by k", "by_k")):
        for name, curve in results[key].items():
            print(f"{name}, mean best speedup {title}: {' '.join(f'{v:.2f}' for v in curve)}")
    for name, mix in results["outcomes"].items():
        for turn, shares in enumerate(mix, 1):
            print(f"{name}, turn {turn}: {outcome_shares(shares)}")
    for name, cost in results["cost"].items():
        print(f"{name}, cost: {', '.join(f'{what} {count:,}' for what, count in cost.items())}")


def evaluate(config: Config) -> None:
    """k trajectories of n turns on every task; with --tiny, by a run's base and by its adapter."""
    tasks = chosen_tasks(config)
    variants = ["adapter" if config.adapter else "base"]
    if config.api_base:
        variants, policy = [config.model], Server(config.api_base, config)
    elif config.tiny:
        found = [c for p in Path("runs").glob("*/base") for c in checkpoints(p.parent)]
        newest = str(max(found, key=lambda p: p.stat().st_mtime, default=""))
        config = replace(config, adapter=config.adapter or newest)  # on record, for a resumed run
        base = Path(config.adapter).resolve().parent.parent / "base"
        if not config.adapter or not base.exists():
            raise UserError(f"{config.adapter} is no checkpoint of a `train --tiny` run"
                            if config.adapter else "no `train --tiny` run with a checkpoint under "
                            "runs/; train first")
        variants, policy = ["base", "adapter"], load_tiny(base, config, config.adapter)
        print(f"evaluating {config.adapter} and its base")
    else:
        policy = load_policy(config)
    run, results = open_run(config, "eval"), {}
    log = run / "turns.jsonl"
    recorded = latest_turns([(turn.light() for turn in read_turns(log))])
    with Judge("cpu" if config.tiny else "cuda", config.cache, config.build_jobs,
               config.unsafe) as judge, contextlib.ExitStack() as stack:
        if config.api_base:  # or what is queued would still be sent after a fault
            stack.callback(policy.pool.shutdown, wait=False, cancel_futures=True)
        write_whole(run / "sandbox.json", json.dumps(judge.layers).encode())
        longest = config.max_prompt_tokens + config.max_new_tokens
        engine = policy if config.api_base else Engine(policy, config.max_batch, config.temperature,
                                                       longest, config.kv_gib, trained=False)
        compiled = {task.id: reference_ms(task, judge.device, compiled=True)
                    for task in tasks if config.compile_baseline}
        for step, name in enumerate(variants):
            plain = name == "base" and not config.api_base
            with policy.lm.disable_adapter() if plain else contextlib.nullcontext():
                turns = run_rollout(engine, judge, policy, tasks, step, config,
                                    config.max_new_tokens, recorded, log, name, Turn.light)
            shown = {name: turns}
            if compiled:
                shown[f"{name} / compile"] = against_compiled(turns, compiled)
            for title, found in shown.items():
                for key, part in evaluation_results(found, tasks, title).items():
                    if title == name or key != "outcomes":  # a baseline does not change these
                        results.setdefault(key, {}).update(part)
    results["compiled_ms"] = compiled
    cost = results["cost"] = {name: collections.Counter() for name in variants}
    for turn in read_turns(log):  # all that was sampled, so also what a beam dropped
        cost[variants[turn.step]].update(turns=1, prompt_tokens=len(turn.prompt_ids),
                                         completion_tokens=len(turn.completion_ids))
    if config.api_base:
        cost[config.model] = dict(cost[config.model]) | policy.used
        print(f"the server was asked for {policy.sampling[0] or 'its own sampling'}")
    print_evaluation(results, config.trajectories, paper=not config.tiny)
    write_whole(run / "results.json", json.dumps(results, indent=1).encode())
    print(f"run folder: {run}")


def audit(run: Path) -> int:
    """Recomputes kernels, feedback, scores, returns, advantages of a log; 1 if any disagrees."""
    config, wrong = Config(**stored_config(run)), 0

    def compare(was, now, *names):
        nonlocal wrong
        for name in names:
            a, b = getattr(was, name), getattr(now, name)
            close = isinstance(a, float) and isinstance(b, float) and abs(a - b) < 1e-9
            if a != b and not close:
                wrong += 1
                print(f"{was.key}: {name.strip('_')} is {a!r} in the log, {b!r} recomputed")

    steps: dict[int, dict[tuple, Turn]] = {}
    for was in read_turns(run / "turns.jsonl"):
        now = replace(was, score=kernel_score(was.verdict, config.correct_weight),
                      kernel=parse_response(was.completion)[1], feedback=feedback(was.verdict))
        compare(was, now, "kernel", "feedback", "score")
        steps.setdefault(was.step, {})[was.key] = now.light()
    for turns in [list(map(found.get, sorted(found))) for found in steps.values()]:
        graded = turns[0].advantage is not None  # an evaluation has no returns
        for was, now in zip(turns, grade(turns, config) if graded else ()):
            compare(was, now, "return_", "advantage")
    count = sum(len(turns) for turns in steps.values())
    print(f"{count} turns of {len(steps)} steps recomputed, {wrong} disagreements")
    return int(wrong > 0)


def show(run: Path, trajectory: str) -> None:
    """Prints the trajectories of a run, or the turns of one, STEP/TASK/INDEX."""
    stored_config(run)  # there must be one
    logged = read_turns(run / "turns.jsonl")
    if not trajectory:
        found = {turn.key: turn.light() for turn in logged}
        for name, same in itertools.groupby(map(found.get, sorted(found)), lambda t: t.name):
            print(name, *[f"{t.verdict.outcome} {t.score or 0:.2f}" for t in same], sep="  ")
        return
    found = {turn.key: turn for turn in logged if turn.name == trajectory}
    if not found:
        raise UserError(f"{run} holds no trajectory {trajectory}; `show {run}` lists them")
    for turn in map(found.get, sorted(found)):
        numbers = {"score": turn.score, "return": turn.return_, "advantage": turn.advantage}
        facts = "".join(f", {name} {x:.4g}" for name, x in numbers.items() if x is not None)
        print(f"==== turn {turn.turn + 1}: {turn.verdict.outcome}{facts} ====\n{turn.completion}\n"
              f"---- feedback ----\n{turn.feedback}\n")


# ---- 14. Report ----------------------------------------------------------------------------------

PAGE_CHARS = 1 << 29  # of prompts and thoughts; beyond, they are cut: browsers have their limits
PALETTE = "#2f7fd1 #b05cc4 #d9702b #d14b57 #c2940a #3a9fae #2f9e63 #8a8f98".split()  # of OUTCOMES
CURVES = {"score/mean": "Score", "score/turn/": "Score by turn", "kernel/correct": "Correct share",
          "kernel/speedup": "Speedup if correct", "length/completion": "Answer in tokens",
          "health/not_okay/": "Not Okay ratio by turn", "health/cut/": "Answers cut by turn",
          "policy/grad_norm": "Gradient norm", "by_turn/": "Mean best speedup",
          "by_k/": "Best@k speedup"}  # series, or what several of them begin with
PAGE = r"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Kevin: report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-@nonce@'">
<style>
:root { color-scheme: light dark } .dim { opacity: .4 } .note { opacity: .6 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem }
body { overflow-wrap: anywhere } select, button { font: inherit } h1, h2 { font-size: 1.3rem }
a, summary { color: light-dark(#1659b5, #8ab8ff); cursor: pointer } select { max-width: 100% }
pre { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; padding: .6rem }
pre, details { margin: .4rem 0 } pre { background: #8881 } .code { white-space: pre }
.wide, .code { overflow-x: auto } table { border-collapse: collapse; font-size: 14px }
td { padding: .2rem 1rem .2rem 0; white-space: nowrap } tr, .line { border-bottom: 1px solid #8885 }
td:first-child { position: sticky; left: 0; background: Canvas; white-space: normal }
td:first-child { min-width: 7rem }
#figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)) }
figure { margin: 0 } svg { width: 100%; height: auto } text { fill: currentColor }
.line { display: flex; flex-wrap: wrap; gap: .3rem .9rem; padding: .4rem 0 }
.chip { color: inherit; text-decoration: none; border-bottom: 4px solid }
.string { color: light-dark(#0a6b3d, #7fd3a4) } .number { color: light-dark(#9a4a00, #f0b072) }
.word { color: light-dark(#7a2fa0, #d9a4f5) } .new { background: #0a33 } .old { background: #d033 }
</style>
<h1>Kevin: report</h1>@tables@<div id="figures">@figures@</div><h2>Trajectories</h2>
<p>Named STEP/TASK/INDEX, as in kevin.py show; turns count from 1. A text that is cut says so.</p>
<div id="filters" class="line"></div><div id="rows"></div>
<p><button id="more">More</button> <span id="count"></span></p><main id="reader"></main>
@index@<script nonce="@nonce@">
const PAGE_ROWS = 50, filters = {}, byId = (id) => document.getElementById(id);
const {colours, trajectories} = JSON.parse(byId("index").textContent);
let hits = [], shown = 0;

// What a model wrote reaches the page as text alone: append makes text nodes of strings.
function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}
const line = (...children) => make("div", {className: "line"}, ...children);
const link = (text, {id}, turn, more) => make("a", {href: `#${id}/${turn}`, ...more}, text);
const fits = (one, turn) => Object.values(filters).every(
  ({name, value}) => !value || value === String(one[name] ?? turn[name]));

function chip(one, turn) {
  const word = turn.outcome === "correct" ? `${Number(turn.speedup).toFixed(2)}x` : turn.outcome;
  return link(word.replace("_", " "), one, turn.turn, {
    className: fits(one, turn) ? "chip" : "chip dim",
    style: `border-color: ${colours[turn.outcome]}`});
}

function list(count) {
  hits = trajectories.filter((one) => one.turns.some((turn) => fits(one, turn)));
  shown = Math.min(count, hits.length);
  byId("rows").replaceChildren(...hits.slice(0, shown).map((one) => line(link(one.name, one, 1),
    filters.run.hidden ? "" : one.run, ...one.turns.map((turn) => chip(one, turn)))));
  byId("count").textContent = `${shown} of ${hits.length} trajectories`;
  byId("more").hidden = shown === hits.length;
}

function addFilter(name) {
  const all = trajectories.flatMap((one) => one.turns.map((turn) => one[name] ?? turn[name]));
  const values = [...new Set(all.map(String))].sort(new Intl.Collator([], {numeric: true}).compare);
  const options = values.map((value) => new Option(`${name} ${value}`, value));
  filters[name] = make("select", {name, ariaLabel: name, onchange: () => list(PAGE_ROWS),
    hidden: values.length < 2}, new Option(`every ${name}`, ""), ...options);
  byId("filters").append(filters[name]);
}

const rule = (comment) => new RegExp("(" + comment +
  /|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|\b\d[\w.]*|\b/.source + "(?:as|auto|bool|class|" +
  "const|constexpr|def|double|elif|else|float\\d?|for|from|half2?|if|import|in|int|lambda|long|" +
  "None|not|or|return|self|struct|template|typename|unsigned|void|while|with|\\w+_t|__\\w+)\\b)");
const PYTHON = rule("#.*"), CUDA = rule("//.*|/\\*[^]*?(?:\\*/|$)|#\\w+"), CHANGE = /^([+-].*)/m;
const KINDS = {"#": "note", "/": "note", '"': "string", "'": "string", "+": "new", "-": "old"};

// The text, coloured where a rule finds something; the second one holds between triple quotes.
function painted(text, ...rules) {
  const node = make("pre", {className: "code"});
  text.split(/(?<="{3}|'{3})/).forEach((part, i) => {
    part.split(rules[i % rules.length]).forEach((piece, j) => {
      const kind = KINDS[piece[0]] ?? (/\d/.test(piece[0]) ? "number" : "word");
      node.append(j % 2 === 1 ? make("span", {className: kind}, piece) : piece);
    });
  });
  return node;
}

function article(one, turn) {
  const short = (value) => typeof value === "number" ? Number(value.toPrecision(4)) : value;
  const facts = ["rule", "score", "return", "advantage", "runtime_ms", "baseline_ms", "error",
    "reference", "device", "tokens", "finish_reason"].filter((name) => (turn[name] ?? "") !== "");
  const plain = (text) => make("pre", {}, text);
  const shared = turn.shared ? `[${turn.shared} characters as in the turn before]\n` : "";
  const parts = [["Message", true, plain(turn.message)], ["Thought", false, plain(turn.thought)],
    ["Prompt", false, plain(shared + turn.prompt)], ["Answer", false, plain(turn.answer)],
    ["Kernel", true, painted(turn.kernel, PYTHON, CUDA)], ["Change of the kernel", false,
      painted(turn.change, CHANGE)], ["Feedback", true, plain(turn.feedback)]];
  return make("article", {id: `turn-${turn.turn}`},
    make("h2", {}, line(link(`Turn ${turn.turn}`, one, turn.turn), chip(one, turn))),
    make("p", {}, facts.map((name) => `${name} ${short(turn[name])}`).join(" · ")),
    ...parts.filter(([,, body]) => body.textContent).map(([title, open, body]) => make(
      "details", {open}, make("summary", {}, title), body)));
}

function showAddressed() {
  const [, id, turn] = location.hash.match(/^#(.*)\/(\d+)$/) ?? [];
  const one = trajectories.find((other) => other.id === id), place = hits.indexOf(one);
  if (!one) return;
  const ways = [["previous", hits[place - 1]], ["next", hits[place + 1]]].filter((way) => way[1]);
  byId("reader").replaceChildren(make("h1", {}, `${one.name} of ${one.run}`), line(
    make("a", {href: "#filters"}, "list"), ...ways.map((way) => link(...way, 1))),
    ...JSON.parse(byId(id)?.textContent ?? "[]").map((found) => article(one, found)));
  (byId(`turn-${turn}`) ?? byId("reader")).scrollIntoView();
}

["run", "step", "task", "turn", "outcome"].forEach(addFilter);
list(PAGE_ROWS);
byId("more").onclick = () => list(shown + PAGE_ROWS);
addEventListener("hashchange", showAddressed);
addEventListener("DOMContentLoaded", showAddressed);  // the trajectories follow this script
</script>
"""


def slim_turn(turn: Turn) -> dict:
    """What the page shows of a turn: every text once, numbers that JSON lacks as words."""
    thought, _, answer = turn.completion.partition("</think>")
    kept = ("prompt", "feedback", "score", "advantage", "finish_reason")
    row = vars(turn.verdict) | {name: getattr(turn, name) for name in kept} | {
        "turn": turn.turn + 1, "thought": thought, "kernel": turn.kernel or "", "shared": 0,
        "answer": answer.replace(turn.kernel, "[kernel]", 1) if turn.kernel else answer,
        "return": turn.return_, "tokens": len(turn.completion_ids), "change": "", "seeds": None}
    return {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()}


def read_run(folder: Path, number: int) -> dict:
    """Name, config, results, series (xs, ys), and trajectories, whose addresses begin with number.

    Of turns it keeps what the index shows, and the rest packed; of a key's turns the last counts.
    """
    found: dict[tuple, tuple[dict, bytes]] = {}
    for turn in read_turns(folder / "turns.jsonl"):
        listed = {"turn": turn.turn + 1, "outcome": turn.verdict.outcome,
                  "speedup": turn.verdict.speedup, "score": turn.score}
        found[turn.key] = listed, zlib.compress(json.dumps(slim_turn(turn)).encode(), 1)
    lines = map(json.loads, read_lines(folder / "metrics.jsonl"))
    rows = list({line["step"]: line for line in lines}.values())
    results = folder / "results.json"
    results = json.loads(results.read_text()) if results.exists() else {}
    series = {re.sub(r"\d+$", lambda index: f"turn {int(index[0]) + 1}", key): (
        [row["step"] for row in rows], [row.get(key, math.nan) for row in rows])
        for key in (rows or [{}])[-1]}
    series |= {f"{kind}/{name}": (range(1, len(values) + 1), values)
               for kind in ("by_turn", "by_k") for name, values in results.get(kind, {}).items()}
    trajectories, variants = [], list(results.get("outcomes", ()))
    for (step, task, place), keys in itertools.groupby(sorted(found), lambda key: key[:3]):
        name, (turns, packed) = f"{step}/{task}/{place}", zip(*map(found.get, keys))
        trajectories.append({
            "id": urllib.parse.quote(f"{number}/{name}", errors="replace"), "name": name,
            "run": str(folder), "step": variants[step] if step < len(variants) else step,
            "task": task, "turns": turns, "packed": packed})
    return {"name": str(folder), "config": stored_config(folder), "series": series,
            "trajectories": trajectories, "results": results}


def unpacked(rows: list[bytes]) -> list[dict]:
    """A trajectory's turns, each prompt from where it parts from the turn before's."""
    turns = [json.loads(zlib.decompress(row)) for row in rows]
    for before, turn in reversed(list(itertools.pairwise(turns))):
        turn["shared"] = len(os.path.commonprefix([before["prompt"], turn["prompt"]]))
        turn["prompt"] = turn["prompt"][turn["shared"]:]
        kernels = before["kernel"].splitlines(), turn["kernel"].splitlines()
        turn["change"] = "\n".join([*difflib.unified_diff(*kernels, lineterm="")][2:])
    return turns


def figure(caption: str, xlabel: str, lines: dict[str, tuple], stacked: bool = False) -> str:
    """An SVG of lines, label: (xs, ys), or of shares of all outcomes, stacked to bars."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({
            "svg.fonttype": "none", "text.parse_math": False, "axes.spines.top": False,
            "axes.spines.right": False, "axes.prop_cycle": matplotlib.cycler(color=PALETTE)}):
        columns, file = max(1, 50 // (max(map(len, lines)) + 8)), io.StringIO()
        height = 2.1 + 0.15 * math.ceil(len(lines) / columns)  # inches: axes and legend
        drawn = Figure(figsize=(3.6, height), layout="constrained")
        axes, floor = drawn.add_subplot(xlabel=xlabel), None
        for label, (xs, ys) in lines.items():
            if stacked:
                axes.bar(xs, ys, 0.9, floor, label=label)
                floor = [y + below for y, below in zip(ys, floor or [0] * len(ys))]
            else:
                axes.plot(xs, ys, ".-", label=f" {label[-44:]}")  # "_" would hide it
        axes.set_ylim(0)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        drawn.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=columns)
        drawn.savefig(file, format="svg", transparent=True)
    svg = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", "",
                 file.getvalue()).replace("#000000", "currentColor")
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>\n"


def figures(runs: list[dict]) -> str:
    """A figure for each of CURVES, runs together, and of each run's outcomes by step or turn."""
    drawn = [(caption, start[3:-1] if start.startswith("by_") else "step", {
        f"{run['name']} {key[len(start):]}".strip(): line for run in runs
        for key, line in run["series"].items() if key.startswith(start)})
        for start, caption in CURVES.items()]
    drawn += [(f"Outcomes of {run['name']}", "step", {
        key[8:]: line for key, line in run["series"].items() if key.startswith("outcome/")}, True)
        for run in runs]
    drawn += [(f"Outcomes of {name} of {run['name']}", "turn", {outcome: (
        range(1, len(mix) + 1), [turn.get(outcome, 0) for turn in mix]) for outcome in OUTCOMES},
        True) for run in runs for name, mix in run["results"].get("outcomes", {}).items()]
    return "".join(figure(*arguments) for arguments in drawn if arguments[2])


def tables(runs: list[dict]) -> str:
    """HTML of what was logged, what evaluations found and how runs are configured, side by side."""
    logged, found, text = {}, {}, ""
    config = {run["name"]: run["config"] for run in runs}
    for run in runs:
        turns = [turn for one in run["trajectories"] for turn in one["turns"]]
        scores = [turn["score"] for turn in turns if turn["score"] is not None]
        logged[run["name"]] = {"turns": len(turns), "score": mean(scores)} | {
            name: mean(turn["outcome"] == name for turn in turns) for name in OUTCOMES}
        k, n = (run["config"][size] for size in ("trajectories", "turns"))
        for name, row in run["results"].get("rows", {}).items():  # as the paper's Tables 1 and 2
            cells = {"trajectories x turns": f"{k} x {n} = {k * n}"} | table_cells(row) | {
                m: row[m] for m in row if m not in COLUMNS and not m.endswith(("/low", "/high"))}
            cells |= run["results"].get("cost", {}).get(name, {})
            if "speedup/best/low" in row:
                ends = (f"{row[f'speedup/best/{end}']:.2f}" for end in ("low", "high"))
                cells["speedup/best"] += f" ({' to '.join(ends)})"
            for column, value in cells.items():
                found.setdefault(column, {})[f"{name} of {run['name']}"] = value
    for title, columns in (("Outcomes", logged), ("Evaluation", found), ("Configuration", config)):
        rows = [["", *columns]] + [[name, *(column.get(name, "") for column in columns.values())]
                                   for name in dict.fromkeys(itertools.chain(*columns.values()))]
        cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
        lines = "\n".join("<tr><td>" + "<td>".join(map(html.escape, row)) for row in cells)
        text += (f'<details class="wide"{" open" * (columns is not config)}><summary>{title}'
                 f"</summary><table>{lines}</table></details>\n") * bool(columns)
    return text


def report(runs: list[Path], out: Path) -> None:
    """One page of the runs' curves, tables and trajectories, which needs no network or server."""
    for folder in runs:
        stored_config(folder)  # before any of them is read
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("report draws with matplotlib: pip install matplotlib")
    read = [read_run(folder, number) for number, folder in enumerate(runs)]
    trajectories = [one for run in read for one in run["trajectories"]]
    count = sum(len(one["turns"]) for one in trajectories)
    limit = PAGE_CHARS // max(2 * count, 1)

    def cut(text):
        middle = f"\n[... {len(text) - limit} characters are in turns.jsonl only ...]\n"
        return text if len(text) <= limit else text[:limit // 2] + middle + text[-limit // 2:]

    def block(name, value):  # without "<" it cannot end its element; ASCII keeps any character
        text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        return f'<script type="application/json" id="{name}">{text}</script>\n'

    rows = {one["id"]: one.pop("packed") for one in trajectories}
    blocks = (block(name, [turn | {key: cut(turn[key]) for key in ("prompt", "thought")}
                           for turn in unpacked(packed)]) for name, packed in rows.items())
    index = {"colours": dict(zip(OUTCOMES, PALETTE, strict=True)), "trajectories": trajectories}
    parts = {"nonce": os.urandom(16).hex(), "tables": tables(read), "figures": figures(read),
             "index": block("index", index)}
    page = re.sub(r"@(\w+)@", lambda match: parts[match[1]], PAGE)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w", encoding="utf-8", errors="replace") as file:
        file.writelines(itertools.chain([page], blocks))
    print(f"{out}: {count} turns, {out.stat().st_size / 2**20:.1f} MiB")


# ---- 15. Tasks: the admission gate (paper A) -----------------------------------------------------

EAGER_RANGE_MS, TASK_MEMORY = (0.1, 20.0), 12 << 30  # on an H200


def listed_tasks(files: str) -> list[Task]:
    """The tasks of comma-separated task files."""
    return [task for file in files.split(",") for task in load_tasks(file)]


def find_task(wanted: str, files: str) -> Task:
    """The task program `wanted`, or the task of that id in comma-separated files."""
    if wanted.endswith(".py"):
        return load_tasks(wanted)[0]
    known = {task.id: task for task in listed_tasks(files)}
    if wanted not in known:
        raise UserError(f"unknown task {wanted}; there are {', '.join(list(known)[:20])}")
    return known[wanted]


def show_task(task: str, tasks: str) -> None:
    """`tasks show ID`: prints a program."""
    found = find_task(task, tasks)
    print(f"# {found.id} {found.name}: {found.ops}\n{found.code}")


class WithoutCall(torch.overrides.TorchFunctionMode):
    """Leaves out one call of a torch function: its first tensor argument becomes the result."""

    def __init__(self, index: int):
        super().__init__()
        self.index, self.calls, self.name = index, 0, ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = next((a for a in args if torch.is_tensor(a)), result)
        if torch.is_tensor(result) and first is not result and first.shape == result.shape:
            self.calls += 1
            if self.calls - 1 == self.index:
                self.name = getattr(func, "__name__", "call").strip("_")
                return first.to(result.dtype)
        return result


def cheap_answers(task: Task, truth: torch.Tensor, device: str):
    """Yields (name, output) of less than the task's work, whose answer for seeds 1 is truth (A)."""
    get_inputs, model, _ = reference_models(task.code, 1, device)
    inputs = seeded_inputs(get_inputs, 1, device)
    yield "zeros", torch.zeros_like(truth)
    others = [model(*seeded_inputs(get_inputs, seed, device)) for seed in (2, 3, 4)]
    yield "another input's answer", others[0]
    if truth.is_floating_point():
        yield "mean of other inputs' answers", sum(others) / len(others)
        yield "constant", truth.mean().expand_as(truth)
        for dim in range(1, truth.ndim):
            rest = [d for d in range(truth.ndim) if d != dim]
            yield f"constant along dimension {dim}", truth.mean(rest, keepdim=True).expand_as(truth)
    del others
    if next(model.parameters(), None) is not None:
        yield "another model's answer", reference_models(task.code, 2, device)[1](*inputs)
    for place, x in enumerate(inputs):
        if not torch.is_tensor(x) or not x.is_floating_point():
            continue
        if x.shape == truth.shape:
            yield f"input {place + 1}", x
        for dim in (d for d in range(x.ndim) if x.shape[d] > 1):
            half, size = x.clone(), x.shape[dim] // 2
            half.narrow(dim, size, x.shape[dim] - size).zero_()
            yield (f"half of dimension {dim} of input {place + 1}",
                   model(*inputs[:place], half, *inputs[place + 1 :]))
    with WithoutCall(-1) as counted:
        model(*inputs)
    for index in range(counted.calls):
        with WithoutCall(index) as without:
            output = model(*inputs)
        yield f"without {without.name} (call {index + 1})", output
    for dtype in (torch.float16, torch.bfloat16):
        rounded = [x.to(dtype).to(x.dtype) if torch.is_tensor(x) and x.is_floating_point() else x
                   for x in inputs]
        weights = {name: p.to(dtype).to(p.dtype) for name, p in model.named_parameters()}
        yield str(dtype).partition(".")[2], torch.func.functional_call(model, weights, (*rounded,))


def check_task(task: Task, device: str) -> dict:
    """The gate's findings on a task: time, memory, spread, closest cheap answer, and its faults."""
    row, closest = {"id": task.id, "faults": []}, (math.inf, "")
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        with torch.no_grad():
            truth, eager, _ = reference_answer(task, 1, 1, device)
            get_inputs, model, _ = reference_models(task.code, 1, device)
            inputs = seeded_inputs(get_inputs, 1, device)
            torch.manual_seed(2)  # a task that draws numbers itself gives another answer
            again = model(*inputs)
            own, problem = compare(eager, truth, eager)
            exact = truth.double()
            row |= {"shape": list(eager.shape), "std": exact.std(correction=0).item(),
                    "min": exact.min().item(), "max": exact.max().item(), "eager_error": own}
            row["faults"] += [f"eager is wrong: {problem}"] * bool(problem)
            same = compare(again, eager.to(truth.dtype), eager)[1]
            row["faults"] += [f"not the same twice: {same}"] * bool(same)
            del again, exact, inputs
            for name, output in cheap_answers(task, truth, device):
                if output.shape != truth.shape:
                    continue
                error, problem = compare(output, truth, eager)
                imprecise = "float16" in name and EAGER_FACTOR * own > MIN_BOUND  # as eager is
                row["faults"] += [f"passes: {name}"] * (not problem and not imprecise)
                if "float16" not in name:
                    closest = min(closest, (error, name))
            row |= {"closest": closest[1], "closest_error": closest[0]}
    except (UserError, JudgeFault, RuntimeError) as e:
        row["faults"].append(str(e).splitlines()[0])
    if device == "cuda" and "closest" in row:
        row["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        row["ms"] = reference_ms(task, device)
        if not EAGER_RANGE_MS[0] <= row["ms"] <= EAGER_RANGE_MS[1] and task.level != "tiny":
            row["faults"].append(f"eager takes {row['ms']:.3g} ms")
        if row["GiB"] * 2**30 > TASK_MEMORY:
            row["faults"].append(f"the check takes {row['GiB']:.3g} GiB")
    reference_models.cache_clear()
    return row


def check_tasks(tasks: str, as_json: bool, device: str) -> int:
    """`tasks check [FILE]`: a line a task and a summary; 1 if a task of a task file fails (A)."""
    failed, listed = 0, listed_tasks(tasks)
    for task in accelerate.utils.tqdm(listed, desc="gate", unit="task"):
        row = check_task(task, device)
        failed += bool(row["faults"])
        numbers = [f"{name} {row[name]:.3g}" for name in ("ms", "GiB", "std", "eager_error")
                   if name in row]
        numbers.append(f"closest {row.get('closest_error', 0):.2g} ({row.get('closest', 'none')})")
        text = f"{task.id:8} {'FAIL' if row['faults'] else 'ok':4} {', '.join(numbers)}"
        text = json.dumps(row) if as_json else "\n         ".join([text, *row["faults"]])
        print(text, flush=True)
    print(f"{len(listed)} tasks, {failed} fail the gate", file=sys.stderr)
    return int(failed > 0 and not Path(tasks).is_dir())  # KernelBench's own have known faults


MAIN_OPERATORS = "Conv2d Matmul Gemm BMM Conv3d ConvTranspose2d ConvTranspose3d".split()
OTHER_OPERATORS = """ReLU Sigmoid Tanh LeakyReLU GELU Swish Softmax Mish Hardtanh HardSwish Add
    Multiply Subtract Divide Clamp Scale ResidualAdd BatchNorm LayerNorm InstanceNorm GroupNorm
    MaxPool AvgPool GlobalAvgPool BiasAdd Sum Mean Max Min LogSumExp""".split()
MAKE_PROMPT = """Write a PyTorch program of the form below that applies these operators in this
order: {operators}. Choose parameters and sizes: PyTorch must need 0.1 to 20 ms for it on an H200,
the inputs at most 0.5 GiB. Draw inputs with zero mean; every operator must change the result.
Answer with the complete program in one fenced block.

```python
{example}```"""
SAFE_MODULES = {"torch", "torch.nn", "torch.nn.functional", "math"}
UNSAFE_NAMES = set("""load save from_file compile cuda subprocess run * format gi_frame gi_code
    f_back f_locals f_globals f_builtins tb_frame""".split()) | {  # torch.os is os
    name for module in (torch, nn, nn.functional) for name, value in vars(module).items()
    if isinstance(value, types.ModuleType)} - {"nn", "functional", "init", "linalg", "special"}


def unsafe_program(code: str) -> str:
    """Why a program that a model wrote may not run in this process, "" if it may.

    >>> unsafe_program("import os"), unsafe_program("import torch\\nx = torch.hub")
    ('line 1: `os`', 'line 2: `hub`')
    """
    tree = parse_program(code)
    nodes = list(ast.walk(tree))
    known = {bound_name(n) for n in nodes}
    for node in nodes:
        found = ""
        if isinstance(node, ast.Name) and node.id not in known - FORBIDDEN | BUILTINS:
            found = node.id
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known |= {a.asname or a.name.split(".")[0] for a in node.names}
            inside = getattr(node, "module", None) in SAFE_MODULES
            found = next((a.name for a in node.names if (
                a.name in UNSAFE_NAMES or a.name[0] == "_" if inside
                else a.name not in SAFE_MODULES)), "")
        if isinstance(node, ast.Attribute) and (node.attr[0] == "_" and node.attr != "__init__"
                                                or node.attr in UNSAFE_NAMES):
            found = node.attr
        if found:
            return f"line {node.lineno}: `{found}`"
    return ""


def model_asker(model: str, api_base: str):
    """ask(prompt, seed): the answer of a server's model, or of one that is loaded here."""
    config = Config(model=model)
    longest = config.max_prompt_tokens + config.max_new_tokens
    chat = Server(api_base, config) if api_base else load_policy(config)
    engine = chat if api_base else Engine(chat, 1, config.temperature, longest)

    def ask(prompt, seed):
        text, ids = chat.render([{"role": "user", "content": prompt}])
        request = Request(None, text, ids, config.max_new_tokens, random.Random(seed))
        engine.add(request)
        while len(engine):
            engine.step()
        return chat.decode(request.completion_ids)

    return ask


def make_tasks(count: int, out: Path, model: str, api_base: str, seed: int, tasks: str,
               device: str) -> None:
    """`tasks make N`: draws operators, has a program written, tries it, until out has N tasks (A).

    Every attempt is noted beside out, and no sequence is tried twice, not even after a restart.
    """
    ask, seen = model_asker(model, api_base), listed_tasks(tasks)
    notes = out.with_suffix(".attempts.jsonl")
    tried = [json.loads(line)["name"] for line in read_lines(notes)]
    made = load_tasks(str(out)) if out.exists() else []
    used = {name.lower() for name in tried + [t.name for t in seen + made]}
    example = next((t for t in seen if t.level == 2), seen[0]).code
    with accelerate.utils.tqdm(total=count, initial=len(made), desc="tasks", unit="task") as bar:
        while len(made) < count:
            draws = random.Random(stable_seed(seed, "make", len(tried)))
            name = ""
            while not name or name.lower() in used:
                others = draws.choices(OTHER_OPERATORS, k=draws.randint(2, 5))
                name = "_".join([draws.choice(MAIN_OPERATORS), *others])
            prompt = MAKE_PROMPT.format(operators=", ".join(name.split("_")), example=example)
            answer = ask(prompt, draws.getrandbits(31))
            code = parse_response(answer if "</think>" in answer else f"</think>{answer}")[1] or ""
            row = {"id": f"M-{len(made) + 1:03}", "level": "new", "name": name, "code": code,
                   "ops": " > ".join(name.split("_"))}
            try:
                fault = unsafe_program(code)
                faults = [fault] if fault else check_task(make_task(row, name), device)["faults"]
            except (UserError, SyntaxError) as e:
                faults = [str(e)]
            tried.append(name)
            used.add(name.lower())
            if not faults:
                made.append(make_task(row, name))
                append_lines(out, [json.dumps(row)])
                bar.update()
            append_lines(notes, [json.dumps({"name": name, "faults": faults})])


# ---- 16. The tiny world: a small model and three small tasks, on the CPU -------------------------

TINY = {  # where --tiny differs
    "tasks_per_step": 3, "trajectories": 8, "turns": 2, "steps": 14, "max_prompt_tokens": 1024,
    "max_new_tokens": 160, "late_new_tokens": 160, "length_normalizer": 160, "learning_rate": 3e-3,
    "warmup_updates": 1, "lora_rank": 8, "lora_alpha": 16}
TINY_WARMUP, TINY_BATCH = 90, 12  # imitation steps, and examples in each
TINY_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}")


def tiny_tokenizer(texts: list[str]):
    """A byte-level BPE whose tokens are mostly whole lines of the texts, with Qwen's chat form."""
    raw = tokenizers.ByteLevelBPETokenizer()
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split("\n", "merged_with_previous"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raw.train_from_iterator(texts * 2, vocab_size=4000, show_progress=False,
                            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=TINY_TEMPLATE)


def tiny_example(task: Task, chat, draws: random.Random) -> tuple[list[int], list[int]]:
    """(prompt ids, answer ids): an answer, sometimes after another with made-up feedback."""
    weights, turns = [answer["weight"] for answer in task.answers], []
    texts = [a["text"] for a in draws.choices(task.answers, weights, k=draws.choice((1, 1, 1, 2)))]
    for text in texts[:-1]:
        outcome = draws.choice(("correct", "incorrect", "compile_error", "hack"))
        verdict = Verdict(outcome, "rule", "message", *(draws.random() for _ in range(3)))
        _, kernel, summary = parse_response(text)
        turns.append(Turn(task.id, 0, 0, 0, "", text, [], [], [], "stop", kernel, summary, verdict,
                          feedback(verdict), 0.0))
    prompt_ids = build_prompt(task, turns, ("cpu", cpu_name()), chat, 4096)[1]
    return prompt_ids, chat.tokenizer(texts[-1] + "<|im_end|>").input_ids


def tiny_policy(run: Path, tasks: list[Task], config: Config, main: bool, barrier) -> Policy:
    """The run's base model, which imitates the tasks' example answers, with a fresh adapter."""
    if main and not (run / "base").exists():
        draws, device = random.Random(config.seed), ("cpu", cpu_name())
        texts = [a["text"] for t in tasks for a in t.answers]
        texts += [base_prompt(t, device, example) for t in tasks for example in (True, False)]
        texts += [feedback(Verdict(o, "rule", "message", 1.0, 1.0, 1.0)) for o in OUTCOMES]
        tokenizer = tiny_tokenizer(texts)
        torch.manual_seed(config.seed)
        policy = Policy(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=192, intermediate_size=576, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
            initializer_range=0.05, tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id)), tokenizer)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, betas=(0.9, 0.98))
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, TINY_WARMUP, pct_start=0.1)
        for _ in accelerate.utils.tqdm(range(TINY_WARMUP), desc="warm-up", leave=False):
            batch = [tiny_example(draws.choice(tasks), policy, draws) for _ in range(TINY_BATCH)]
            tokens = sum(len(answer) for _, answer in batch)
            for prompt, answer in batch:
                (-policy(prompt, answer, temperature=1.0).sum() / tokens).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        policy.lm.save_pretrained(run / "base.partial")
        tokenizer.save_pretrained(run / "base.partial")
        (run / "base.partial").rename(run / "base")
    barrier()
    torch.set_num_threads(1)  # the compilers have the other cores; threads without one only spin
    return load_tiny(run / "base", config)


def load_tiny(folder: Path, config: Config, adapter: str = "") -> Policy:
    """A run's base model on the CPU, with a fresh adapter or the given one."""
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    torch.manual_seed(config.seed)  # the same fresh adapter on every process
    return with_adapter(lm, tokenizer, config.lora_rank, config.lora_alpha, adapter)


# ---- 17. Command line ----------------------------------------------------------------------------

EVAL_ONLY = ["adapter", "api_base", "beam", "compile_baseline"]
TRAIN_ONLY = """tasks_per_step late_new_tokens late_step gamma aggregate scale steps learning_rate
    updates_per_step warmup_updates clip_low clip_high stop_on_junk max_grad_norm kl
    length_normalizer""".split()
RUN = {"type": Path, "help": "run folder"}
TASK_FILES = {"default": "tasks.jsonl,eval_tasks.jsonl", "help": "task files, comma-separated"}
DEVICE = {"choices": ("cuda", "cpu"), "help": "default: cuda if found"}
AS_JSON = {"dest": "as_json", "action": "store_true", "help": "JSON objects on stdout"}
ARGUMENTS = {  # of the commands that have no Config, as argparse takes them
    "score": {
        "--task": {"required": True, "help": "task id, or a task program (.py)"},
        "--candidate": {"required": True, "nargs": "+", "help": "candidate files"},
        "--tasks": TASK_FILES, "--json": AS_JSON, "--device": DEVICE,
        "--cache": {"default": Config.cache, "help": "folder of built kernels"},
        "--unsafe": {"action": "store_true", "help": "run what cannot be contained"}},
    "audit": {"run": RUN},
    "show": {"run": RUN, "trajectory": {"nargs": "?", "default": "", "help": "STEP/TASK/INDEX"}},
    "report": {"runs": RUN | {"nargs": "+"},
               "--out": {"type": Path, "default": "report.html", "help": "page to write"}},
    "tasks show": {"task": {"help": "task id"}, "--tasks": TASK_FILES},
    "tasks check": {"tasks": TASK_FILES | {"nargs": "?"}, "--json": AS_JSON, "--device": DEVICE},
    "tasks make": {
        "count": {"type": int, "help": "number of tasks in the end"},
        "--out": {"type": Path, "default": "new_tasks.jsonl", "help": "file that is filled"},
        "--model": {"default": Config.model, "help": "model that writes tasks"},
        "--api-base": {"default": "", "help": "OpenAI-compatible server of that model"},
        "--seed": {"type": int, "default": 0, "help": "seed of the sequences"},
        "--tasks": TASK_FILES, "--device": DEVICE}}


def make_parser(command: str) -> argparse.ArgumentParser:
    """A parser without abbreviations whose complaints are one line."""

    def complain(message):
        raise UserError(f"{command}: {message}")

    parser = argparse.ArgumentParser(f"kevin.py {command}", allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = complain
    for name, options in ARGUMENTS.get(command, {}).items():
        parser.add_argument(name, **options)
    return parser


def parse_config(command: str, argv: list[str]) -> Config:
    """The Config of a command line over the defaults: Config's, --tiny's, the resumed run's."""
    parser = make_parser(command)
    for f in fields(Config):
        if f.name not in (TRAIN_ONLY if command == "eval" else EVAL_ONLY):
            kind = {"choices": get_args(f.type)} if get_args(f.type) else {"type": f.type}
            kind = {"action": "store_true"} if f.type is bool else kind
            flags = ["--" + f.name.replace("_", "-")] + ["--k"] * (f.name == "trajectories")
            parser.add_argument(*flags, default=f.default, help=f.metadata["help"], **kind)
    if command == "eval":
        parser.set_defaults(tasks="eval_tasks.jsonl", turns=8)
    given = parser.parse_args(argv)
    if given.tiny:
        kept = ("turns", "trajectories") if command == "eval" else ()
        tiny = {k: v for k, v in TINY.items() if hasattr(given, k) and k not in kept}
        parser.set_defaults(tasks="tasks.jsonl", **tiny)
    if given.resume:
        parser.set_defaults(**stored_config(Path(given.resume), command))
    return Config(**vars(parser.parse_args(argv)))


def score(task: str, candidate: list[str], tasks: str, as_json: bool, device: str, cache: str,
          unsafe: bool) -> int:
    """`score`: verdicts on candidate files; 0 all correct, 1 some not, 3 the judge failed."""
    problem, outcomes = find_task(task, tasks), set()
    for file in candidate:
        if not Path(file).is_file():
            raise UserError(f"candidate file {file} does not exist")
    with Judge(device, cache, unsafe=unsafe) as judge:
        builds = [judge.submit(Path(file).read_text("utf-8", "replace")) for file in candidate]
        for file, build in zip(candidate, builds):
            built = build.result()
            verdict = built if isinstance(built, Verdict) else judge.check(problem, built)
            outcomes.add(verdict.outcome)
            row = {"candidate": file, "task": problem.id, **asdict(verdict),
                   "score": kernel_score(verdict), "feedback": feedback(verdict)}
            text = f"{file}: {verdict.outcome}, score {row['score']}\n{row['feedback']}\n"
            print(json.dumps(row) if as_json else text, flush=True)
    off = [f"{layer} ({state})" for layer, state in judge.layers.items() if state != "on"]
    if off:
        print(f"kevin: layers of the sandbox that are off: {', '.join(off)}", file=sys.stderr)
    return 3 if "judge_error" in outcomes else int(outcomes != {"correct"})


COMMANDS = {"train": train, "eval": evaluate, "score": score, "audit": audit, "show": show,
            "report": report, "tasks show": show_task, "tasks check": check_tasks,
            "tasks make": make_tasks}


def main(argv: list[str]) -> int:
    """The command line; bad input is one line on stderr and exit status 2."""
    words = 2 if argv[:1] == ["tasks"] else 1
    command, rest = " ".join(argv[:words]), argv[words:]
    try:
        if command in COMMANDS:
            if command in ("train", "eval"):
                given = {"config": parse_config(command, rest)}
            else:
                given = vars(make_parser(command).parse_args(rest))
            if "device" in given and not given["device"]:
                given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
            if given.get("device") == "cuda" and not torch.cuda.is_available():
                raise UserError("--device cuda: this machine, or this torch, has no CUDA")
            return COMMANDS[command](**given) or 0
        if argv and argv[-1] not in ("-h", "--help"):
            raise UserError(f"no command {command}; there are {', '.join(COMMANDS)}")
        print(__doc__)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt:
        hint = "; --resume goes on with the run" * (command in ("train", "eval"))
        print(f"kevin: interrupted{hint}", file=sys.stderr)
        return 130
    except (UserError, JudgeFault) as e:
        print(f"kevin: {e}", file=sys.stderr)
        return 2 if isinstance(e, UserError) else 3
    except OSError as e:
        if not e.filename:  # no file of the user's: a fault of this script
            raise
        print(f"kevin: {e.filename}: {e.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["zygote"]:  # the judge starts this file; not a command
        zygote_main(int(sys.argv[2]))
    sys.exit(main(sys.argv[1:]))
