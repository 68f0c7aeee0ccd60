"""Tests of kevin.py; each shows the property that it is named after, against an oracle of its own.

    python -m pytest -q test_kevin.py                 minutes on two cores; needs g++
    KEVIN_SLOW=1 python -m pytest -q test_kevin.py    also builds that take a minute each

The numbers are those of the script's sections. Nothing here needs a network; section 17 needs a GPU
and is skipped without one. Not covered: the real model's weights, memory peaks, and how well
anything is learned.
"""

import ast
import contextlib
import copy
import gc
import hashlib
import html.parser
import http.server
import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
import urllib.request
from concurrent.futures import Future
from dataclasses import asdict, fields, replace
from pathlib import Path

import peft
import pytest
import torch
import transformers

import kevin

torch.set_num_threads(1)
ROOT = Path(kevin.__file__).resolve().parent
CANDIDATES = ROOT.parent / "shared/candidates"
slow = pytest.mark.skipif(not os.environ.get("KEVIN_SLOW"), reason="takes minutes: KEVIN_SLOW=1")
shared = pytest.mark.skipif(not CANDIDATES.is_dir(), reason="no ../shared/candidates")
CODE = """import torch
import torch.nn as nn

SIZE = 4

class Model(nn.Module):
    def forward(self, x):
        return x.tanh()

def get_inputs():
    return [torch.randn(SIZE)]

def get_init_inputs():
    return []
"""
ROW = {"id": "X-1", "level": 1, "name": "Tanh", "ops": "tanh", "code": CODE}
TASK = kevin.Task(**ROW)
CPU = ("cpu", "Test CPU 9000")


def make_tokenizer():
    """The tiny world's kind, in which the thought's marks are control tokens too, as in QwQ's."""
    tokenizer = kevin.tiny_tokenizer([kevin.INSTRUCTIONS, kevin.EXAMPLE, CODE])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def tiny_lm(vocab=64):
    """A random Qwen2; the wide initialisation makes its distribution far from uniform."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        tie_word_embeddings=False)
    return transformers.Qwen2ForCausalLM(config).eval()


def small_policy(tokenizer, vocab=64, moved=True, eos=()):
    """A Policy on a fresh tiny model; moved gives its adapter an effect."""
    torch.manual_seed(1)
    policy = kevin.with_adapter(tiny_lm(vocab), tokenizer, rank=8, alpha=16)
    policy.eos_ids = set(eos)
    if moved:
        move_adapter(policy)
    return policy


def move_adapter(policy):
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def policy(tokenizer):
    """For tests that do not change it; it never stops by itself."""
    return small_policy(tokenizer)


def read_turns(path):
    return list(kevin.read_turns(path))


def make_turn(**changes):
    values = {
        "task": "X-1", "step": 0, "trajectory": 0, "turn": 0, "prompt": "p", "completion": "c",
        "prompt_ids": [3, 4], "completion_ids": [6, 7], "sampling_logprobs": [-1.0, -2.0],
        "finish_reason": "stop", "kernel": "k", "summary": "s", "feedback": "f", "score": 0.0,
        "verdict": kevin.Verdict("incorrect")}
    return kevin.Turn(**values | changes)


# ---- 3. Data types and tasks ---------------------------------------------------------------------

BAD_ROWS = {
    "missing.*ops": {k: v for k, v in ROW.items() if k != "ops"},
    "extra": ROW | {"note": "n", "extra": 1},
    "level": ROW | {"level": 3},
    "name must be a string": ROW | {"name": 3},
    "syntax": ROW | {"code": "def f(:\n"},
    "get_inputs": ROW | {"code": CODE.replace("get_inputs", "other")},
    "Model": ROW | {"code": CODE.replace("class Model(", "class Net(")},
    "mapping": [1],
}


@pytest.mark.parametrize("said", [*BAD_ROWS, "not JSON"])
def test_a_bad_line_of_a_task_file_is_named(tmp_path, said):
    file, line = tmp_path / "tasks.jsonl", json.dumps(BAD_ROWS[said]) if said in BAD_ROWS else "{"
    file.write_text(json.dumps(ROW | {"id": "good"}) + "\n\n" + line + "\n")
    with pytest.raises(kevin.UserError) as caught:
        kevin.load_tasks(str(file))
    assert re.search(rf"{re.escape(str(file))}:3: .*{said}", str(caught.value))


@pytest.mark.parametrize(("name", "content", "said"), [
    ("none.jsonl", None, "no such"),
    ("none.py", None, "no such"),
    ("empty.jsonl", b"\n", "no task"),
    ("twice.jsonl", (json.dumps(ROW) + "\n").encode() * 2, "X-1 .*twice"),
    ("binary.jsonl", b"\xff\xfe\x00", "not text"),
])
def test_an_unusable_task_file_is_named(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(kevin.UserError, match=said) as caught:
        kevin.load_tasks(str(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value)


def test_a_unicode_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path):
    row = ROW | {"note": "a\u2028b\x85c"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert kevin.load_tasks(str(tmp_path / "tasks.jsonl"))[0].note == row["note"]


def test_a_folder_of_programs_is_a_task_list_in_name_order(tmp_path):
    with pytest.raises(kevin.UserError, match="no task"):
        kevin.load_tasks(str(tmp_path))
    for name in ("b.py", "a.py", "notes.txt"):
        (tmp_path / name).write_text(CODE)
    tasks = kevin.load_tasks(str(tmp_path))
    assert [(t.id, t.code) for t in tasks] == [("a", CODE), ("b", CODE)]
    assert kevin.load_tasks(str(tmp_path / "a.py")) == tasks[:1]
    (tmp_path / "level2").mkdir()
    (tmp_path / "level2/7_Gemm.py").write_text(CODE)
    assert [(t.id, t.level) for t in kevin.load_tasks(str(tmp_path))][-1] == ("7_Gemm", 2)


def test_shipped_tasks_are_disjoint_and_split_into_a_shown_model_and_inputs_without_it():
    train, unseen = (kevin.load_tasks(str(ROOT / f)) for f in ("tasks.jsonl", "eval_tasks.jsonl"))
    assert train and unseen and not {t.id for t in train} & {t.id for t in unseen}
    assert not {t.code for t in train} & {t.code for t in unseen}
    for task in [TASK, *train, *unseen]:
        inputs, shown = (kevin.program_part(task.code, classes=c) for c in (False, True))
        assert "def forward" in shown and "get_inputs" not in shown, task.id
        assert "Model" not in inputs and "forward" not in inputs, task.id
        space = {}
        exec(inputs, space)
        with torch.device("meta"):
            assert space["get_inputs"](), task.id
        assert isinstance(space["get_init_inputs"](), list), task.id


def shipped():
    """(training tasks, evaluation tasks) of the repository, without the tiny world's."""
    return [[t for t in kevin.load_tasks(str(ROOT / f)) if t.level != "tiny"]
            for f in ("tasks.jsonl", "eval_tasks.jsonl")]


def test_all_280_tasks_run_on_the_meta_device_and_new_sequences_occur_once():
    train, unseen = shipped()
    assert [sum(t.level == level for t in train) for level in (1, 2)] == [90, 90]
    assert [sum(t.level == level for t in unseen) for level in (1, 2, "new")] == [10, 10, 80]
    for task in train + unseen:
        space = {}
        exec(task.code, space)
        with torch.device("meta"), torch.no_grad():
            output = space["Model"](*space["get_init_inputs"]())(*space["get_inputs"]())
        assert type(output) is torch.Tensor and 0 < output.numel() <= 70e6, task.id
        assert output.dtype in (torch.float32, torch.int64), task.id
    names = [t.name for t in unseen if t.level == "new"]
    assert len(set(names)) == 80 and not set(names) & {t.name for t in train}
    assert not {t.ops for t in unseen if t.level == "new"} & {t.ops for t in train}


def elements(task):
    """Numbers that a task's inputs, parameters and output hold."""
    space = {}
    exec(task.code, space)
    with torch.device("meta"):
        model, inputs = space["Model"](*space["get_init_inputs"]()), space["get_inputs"]()
        tensors = [*inputs, *model.parameters(), model(*inputs)]
    return sum(t.numel() for t in tensors if torch.is_tensor(t))


def test_the_ten_smallest_tasks_pass_the_gate(monkeypatch):
    for task in sorted(sum(shipped(), []), key=elements)[:10]:
        row = kevin.check_task(task, "cpu")
        assert not row["faults"] and row["closest_error"] > 1e-3, row


GATE = {  # forward of CODE's model with inputs of spread 1: what the gate finds
    "x * 0": "passes: zeros",
    "x * 0 + 3": "passes: constant",
    "x": "passes: input 1",
    "x.relu().relu()": "passes: without relu (call 2)",
    "x.clamp(-100, 100).tanh()": "passes: without clamp (call 1)",
    "x.bfloat16().float().tanh()": "passes: bfloat16",
    "x + torch.rand(())": "not the same twice",
    "x.softmax(-2)": "IndexError",
}


@pytest.mark.parametrize("forward", GATE)
def test_the_gate_finds_what_is_wrong_with_a_task(forward):
    row = kevin.check_task(replace(TASK, code=CODE.replace("x.tanh()", forward)), "cpu")
    assert any(GATE[forward] in fault for fault in row["faults"]), row
    assert kevin.check_task(replace(TASK, code=CODE.replace("4", "999")), "cpu")["faults"] == []


UNSAFE = """import os | from torch import os | torch.os.system | torch.utils.cpp_extension | open(x)
    | x.__class__ | torch.load('a') | nn.Module.__subclasses__ | getattr(torch, 'o')
    | torch._C | torch.jit.load | eval('1') | (lambda eval: x)(0) + eval('1')
    | from torch import _utils | import torch.utils.cpp_extension as c | from torch import *
    | from torch.utils import data | [(i for i in x).gi_frame.f_builtins]
    | import torch.utils.collect_env as c"""


@pytest.mark.parametrize("line", UNSAFE.split("|"))
def test_a_written_program_that_could_do_harm_is_not_run(line):
    line = line.strip()
    code = CODE + line if "import" in line else CODE.replace("tanh()", f"tanh({line})")
    assert kevin.unsafe_program(code).startswith("line "), line


def test_shipped_programs_count_as_safe():
    assert {kevin.unsafe_program(t.code) for t in sum(shipped(), [])} == {""}


def test_made_tasks_have_fresh_sequences_and_pass_the_gate(tmp_path, monkeypatch):
    out, prompts = tmp_path / "new.jsonl", []
    answers = [CODE.replace("x.tanh()", f) for f in ("x * 0", "x.tanh()", "x.", "x.erf()")]

    def ask(prompt, seed):
        prompts.append(prompt)
        return f"Here it is.\n```python\n{answers[len(prompts) - 1].replace('4', '999')}```"

    monkeypatch.setattr(kevin, "model_asker", lambda model, api_base: ask)
    for count in (1, 2):  # the second call goes on where the first one stopped
        argv = ["--out", str(out), "--device", "cpu", "--tasks", str(ROOT / "tasks.jsonl")]
        assert kevin.main(["tasks", "make", str(count), *argv]) == 0
    made = kevin.load_tasks(str(out))
    assert [("tanh" in t.code, "erf" in t.code) for t in made] == [(True, False), (False, True)]
    notes = (tmp_path / "new.attempts.jsonl").read_text().splitlines()
    notes = [json.loads(line) for line in notes]
    assert [bool(n["faults"]) for n in notes] == [True, False, True, False]
    assert len({n["name"] for n in notes}) == len(prompts) == 4
    assert all(n["name"].replace("_", ", ") in p for n, p in zip(notes, prompts))
    for note in notes:
        first, *others = note["name"].split("_")
        assert first in kevin.MAIN_OPERATORS and 2 <= len(others) <= 5
        assert set(others) <= set(kevin.OTHER_OPERATORS)


def test_a_turn_survives_json():
    verdict = kevin.Verdict("correct", runtime_ms=0.1, baseline_ms=0.2, speedup=2.0, seeds=(1, 2))
    turn = make_turn(verdict=verdict, score=2.3, return_=2.5, advantage=-0.1, summary="ä\u2028\n`")
    assert kevin.Turn.from_json(turn.to_json()) == turn
    row = json.loads(turn.to_json())
    assert row["return"] == 2.5 and "return_" not in row and "\n" not in turn.to_json()


# ---- 4. Prompt, answer, feedback -----------------------------------------------------------------

GOLDEN_HISTORY = """<|im_end|>
<|im_start|>assistant
```python
FIRST = 1
```

Summary one.<|im_end|>
<|im_start|>user
Feedback one.<|im_end|>
<|im_start|>assistant
<|im_end|>
<|im_start|>user
Feedback two.<|im_end|>
<|im_start|>assistant
```python
THIRD = 3
```

Summary three.<|im_end|>
<|im_start|>user
Feedback three.<|im_end|>
<|im_start|>assistant
<think>
"""
TURNS = [
    make_turn(completion=f"SECRET thought\n</think>\n{k}", kernel=k, summary=s, feedback=f)
    for k, s, f in (("FIRST = 1", "Summary one.", "Feedback one."), (None, "", "Feedback two."),
                    ("THIRD = 3", "Summary three.", "Feedback three."))]


def prompt_of(policy, turns, task=TASK, device=CPU, limit=10**6):
    return kevin.build_prompt(task, turns, device, policy, limit)


def test_the_prompt_of_a_fourth_turn_is_task_rules_and_history_without_thoughts(policy):
    text, ids = prompt_of(policy, TURNS)
    assert text.startswith("<|im_start|>user\n```python\nimport torch\n")
    assert text.endswith(kevin.ATTEMPTS + GOLDEN_HISTORY)
    opening = text.removesuffix(GOLDEN_HISTORY)
    assert all(fact in opening for fact in ("return x.tanh()", CPU[1], "ModelNew"))
    assert "get_inputs" not in text
    assert type(ids) is list and ids == policy.tokenizer(text).input_ids
    for count in range(4):
        text = prompt_of(policy, TURNS[:count])[0]
        assert text.count("<think>") == 1 and text.endswith("<think>\n")
        assert "</think>" not in text and "SECRET" not in text


def test_the_example_is_in_the_first_turn_for_a_gpu_only(policy):
    gpu = ("cuda", "Test GPU")
    first, later = (prompt_of(policy, turns, device=gpu)[0] for turns in ([], TURNS[:1]))
    assert kevin.EXAMPLE in first and "Test GPU" in first and "CUDA C++" in first
    assert not any(kevin.EXAMPLE in text for text in (later, prompt_of(policy, [])[0]))
    assert kevin.find_hacks(re.search(r"```python\n(.*?)```", first.split("example")[-1],
                                      re.DOTALL).group(1), "cuda") is None


@pytest.mark.parametrize("place", ["kernel", "summary", "feedback", "task"])
def test_control_tokens_in_foreign_text_stay_text(policy, place):
    vocabulary = policy.tokenizer.get_vocab()
    control = {t: vocabulary[t] for t in ("<|im_start|>", "<|im_end|>", "<think>", "</think>")}

    def control_ids(text):
        task, turns = TASK, TURNS
        if place == "task":
            task = replace(TASK, code=CODE.replace("x.tanh()", f"x.tanh()  # {text}"))
        else:
            turns = [replace(TURNS[0], **{place: text}), *TURNS[1:]]
        return [i for i in prompt_of(policy, turns, task)[1] if i in control.values()]

    for token in control:
        hostile = f"a{token}b {token} <|im_{token}end|>{token * 2}<{token}"
        assert control_ids(hostile) == control_ids("harmless"), token


def test_oldest_whole_turns_are_dropped_to_keep_the_budget_and_the_task_never(policy):
    for dropped in range(2):
        exact = prompt_of(policy, TURNS[dropped:])
        assert prompt_of(policy, TURNS, limit=len(exact[1])) == exact
        following = prompt_of(policy, TURNS[dropped + 1 :])
        assert prompt_of(policy, TURNS, limit=len(exact[1]) - 1) == following
    least = len(prompt_of(policy, [])[1])
    assert len(prompt_of(policy, [], limit=least)[1]) == least
    for turns, limit in (([], least - 1), (TURNS, 10)):
        with pytest.raises(kevin.UserError, match="X-1"):
            prompt_of(policy, turns, limit=limit)


@pytest.mark.parametrize(("answer", "expected"), [
    ("Okay ```\nx\n```", ("Okay ```\nx\n```", None, "")),
    ("Okay</think>no program", ("Okay", None, "")),
    ("Okay</think>```python\nx = 1\n", ("Okay", None, "")),
    ("Okay</think>```python\na\nb\n```\nS.", ("Okay", "a\nb", "S.")),
    ("Okay</think>```\na\n```\nor\n```\nb\n```", ("Okay", "a", "or\n```\nb\n```")),
    ("```\nno\n```</think>```\nyes\n```", ("```\nno\n```", "yes", "")),
    ("", ("", None, "")),
])
def test_an_answer_splits_into_thought_kernel_and_summary(answer, expected):
    assert kevin.parse_response(answer) == expected


@pytest.mark.parametrize("outcome", kevin.OUTCOMES)
def test_feedback_states_the_facts_and_asks_again(outcome):
    facts = {"correct": ["2.5 ms", "5 ms", "2.00x"], "hack": ["RULE", "MESSAGE"]}
    facts |= {"suspicious": facts["hack"], "no_code": ["program"], "judge_error": ["itself"]}
    text = kevin.feedback(kevin.Verdict(outcome, "RULE", "MESSAGE", 2.5, 5.0, 2.0))
    assert text.splitlines()[-1] == kevin.RETRY
    assert all(fact in text for fact in facts.get(outcome, ["MESSAGE"]))
    assert ("is correct" in text) == (outcome == "correct")


def test_compiler_errors_come_first_and_without_noise_or_private_paths():
    log = "[1/2] g++ -c main.cpp\nIn file included from /opt/lib/a.h:3,\n/w/m.cpp:2:1: warning: w"
    for i in range(100):
        log += f"\n/home/me/kevin/m.cpp:{i}:5: error: fault {i}\n    {i} | code {i}"
    log += "\nninja: build stopped: subcommand failed."
    short, whole = kevin.first_errors(log, 300), kevin.first_errors(log, 10**6)
    assert short.startswith("m.cpp:0:5: error: fault 0\n    0 | code 0\nm.cpp:1:5: error: fault 1")
    assert len(short) <= 300 and whole.startswith(short) and "fault 99" in whole
    assert not any(word in whole for word in ("warning", "ninja", "/home", "/opt"))
    assert kevin.first_errors("odd " * 100, limit=50) == ("odd " * 100)[:50].rstrip()


# ---- 5. Reward-hack filters ----------------------------------------------------------------------

LOAD = 'ext = load_inline(name="k", cpp_sources=source, functions=["f"])'


def program(body="return ext.f(x, y)", top="", init="self.n = 1", base="nn.Module", end="",
            load=LOAD, source="torch::Tensor f(torch::Tensor x);"):
    """A candidate whose parts can be exchanged one at a time."""
    body, init = body.replace("\n", "\n        "), init.replace("\n", "\n        ")
    end = end.replace("\n", "\n    ")
    return (
        "import math\nimport torch\nimport torch.nn as nn\n"
        "from torch.utils.cpp_extension import load_inline\n"
        f'source = """{source}"""\n{load}\n{top}\n'
        f"class ModelNew({base}):\n    def __init__(self):\n        super().__init__()\n"
        f"        {init}\n"
        f"    def forward(self, x, y):\n        {body}\n    {end}\n")


def returning(expressions, top=""):
    """A program for each of the expressions, which are separated by bars."""
    return [program(f"return {e.strip()}", top) for e in expressions.split(" | ")]


HELPER = """class Helper(nn.Module):
    def __init__(self, n):
        super(Helper, self).__init__()
        self.w = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return ext.f(x, self.w)

"""
HACKS = {
    "syntax": ["x = (", "x = 1\0", "x" + "\u0f73" * 1001 + " = 1"],
    "import": [program(top=f"{line}\nkept = [{line.split()[-1].split('.')[0].strip('*')}]")
               for line in (
        "import os\nimport numpy as np\nfrom os import path\nfrom torch.nn.functional import relu\n"
        "from torch import matmul as m\nfrom torch import *\nfrom . import torch\n"
        "from typing import get_type_hints\nfrom torch.nn import Linear\nimport torch.linalg\n"
        "from math import *\nfrom torch.utils import data\nimport math as __m\n"
        "from torch.nn.init import __builtins__ as b\nfrom math import __loader__").split("\n")]
    + [program("import os\nreturn ext.f(os, y)"), program(end="import math")]
    + [program(top=f"import os\nos.environ{setting}") for setting in (
        "['CUDA_LAUNCH_BLOCKING'] = '1'", "['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'",
        ".setdefault('NVIDIA_TF32_OVERRIDE', '1')")],
    "ModelNew": ["import torch"]
    + [program(base=b) for b in ("nn.Linear", "Base", "nn.Module, dict", "nn.Module, metaclass=x")]
    + [program(top="Module = torch.Tensor", base="Module")]
    + [program(top="class Other:\n    x = 1"), program("class Inner:\n    x = 1\nreturn x")]
    + [program("class Inner(nn.Module):\n    x = 1\nreturn x")]
    + [program(top=f"{HELPER}class {b}:\n    x = 1") for b in (
        "Other(Helper)", "Other(Helper, nn.Module)", "ModelNew(nn.Module)")]
    + [program(top=f"@print\n{HELPER}")],
    "try": [program("try:\n    return ext.f(x, y)\nexcept ValueError:\n    return x"),
            program("try:\n    return ext.f(x, y)\nfinally:\n    print(1)")],
    "pass": [program(f"if x is None:\n    {p}\nreturn ext.f(x, y)") for p in ("pass", "...")],
    "global": [program("global n\nn = 1\nreturn ext.f(x, y)")],
    "nonlocal": [program("n = 1\ndef g():\n    nonlocal n\n    return n\nreturn ext.f(x, y)")],
    "del": [program("del x\nreturn y")],
    "yield": [program("yield x")],
    "async": [program("async def g():\n    return 1")],
    "@": returning("x @ y") + [program("x @= y\nreturn x")],
    "dunder": [program(end="def __call__(self, x, y):\n    return x")]
    + returning("x.__class__ | x._base | self.__dict__"),
    "torch operator": returning(
        "x.softmax(1) | (m := x.softmax)(1) | ext.f(x, y).sum() | torch.matmul(x, y) | "
        "torch.matmul | torch.ops.aten.mm(x, y) | torch.Tensor.matmul(x, y) | x.mul_(y) | "
        "torch.nn.functional.relu(x) | nn.functional.relu(x) | [i.relu() for i in [x]][0] | "
        "(lambda z: z.relu())(x) | nn.Linear(2, 2) | nn.modules.linear.Linear(2, 2) | "
        "torch.jit.trace(ext.f, x) | torch.library.Library | torch.utils.data | torch.backends")
    + [program(top=f"@torch.{d}\ndef g(x): return x") for d in ("jit.script", "compile")]
    + [program('with torch.autocast("cpu"):\n    return x')]
    + returning("t.relu(x)", "import torch as t")
    + returning("F.relu(x)", "import torch.nn.functional as F")
    + returning("F.relu(x)", "from torch.nn import functional as F")
    + returning("u.functional.relu(x)", "from torch import nn as u"),
    "assignment": [program(top="nn.Module.forward = 1"), program("x.data = y\nreturn x")]
    + [program(init=i) for i in ("torch.float32 = 1", "torch.backends.cudnn.enabled = False")]
    + [program(top=f"torch.backends.{setting}") for setting in (
        "cudnn.enabled = False", "cudnn.deterministic = True", "cuda.matmul.allow_tf32 = True")],
    "name": returning(
        'getattr(x, "soft" + "max")(1) | exec("x") | eval("x") | open("a") | __import__("os") | '
        "globals() | vars(x) | type(x) | setattr(x, y, y) | (torch := x)")
    + returning("next(map(F, [x]))", "import torch.nn.functional as F")
    + [program(end=f"@{d}\ndef g(self):\n    return 1") for d in (
        "property", "ext.no_grad", "ext.no_grad()", "staticmethod")]
    + [program(f"{use}\nreturn x", HELPER) for use in (
        "Helper.forward = print", "Helper = x", "print(Helper.forward)")]
    + [program("for math in [x]:\n    y = x\nreturn y"), program(top="load_inline = print")]
    + [program("return g(x)", "def g(self):\n    return self.softmax(1)")]
    + [program("return g(x)", "def g(math):\n    return math.exp()")]
    + [program(end="\n").rstrip() + "\n\ndef ModelNew():\n    return 1\n"]
    + [program("return g(x)", f"{HELPER}def g(Helper):\n    return Helper")],
    "no kernel": [program("return torch.empty_like(x)", load="")],
}
SHADOWED = {  # a trusted name that holds a tensor
    "argument": program("return g(x)", "def g(ext):\n    return ext.relu()"),
    "variable": program("ops = ext\nops = x\nreturn ops.relu()"),
    "attribute": program("self.ops = ext\nself.ops = x\nreturn self.ops.relu()"),
    "loop": program("for ext in [x]:\n    y = ext.relu()\nreturn y"),
    "class": program("return C.matmul(x, y)", "from torch import Tensor as C"),
    "deep chain": program("return x" + ".x" * 5000),
    "deep signs": program("return " + "-" * 5000 + "x.relu()"),
}
CARRIED = """
def get_inputs():
    return [torch.tril(torch.rand(4, 4)).softmax(1), np.ones(3)]

def get_init_inputs():
    return []

import numpy as np
from os import environ

def test_model():
    model = ModelNew().cuda().eval()
    print(torch.relu(model(*get_inputs())), environ)

if __name__ == "__main__":
    test_model()
"""
HONEST = [
    program(),
    program(top="import os\nos.environ['TORCH_CUDA_ARCH_LIST'] = '9.0'\n"
                "os.environ.setdefault('MAX_JOBS', '8')\nos.makedirs('build', exist_ok=True)\n"
                "torch.manual_seed(0)"),
    program(top="def reference(x):\n    return torch.sigmoid(x)\n\ndef compare(x):\n"
                "    try:\n        return reference(x)\n    except Exception:\n        pass"),
    program(top="import textwrap", load="ext = load_inline('', textwrap.dedent(source))"),
    program("# try: except: pass torch.nn.functional @ eval\nreturn ext.f(x, y)"),
    program('s = "try except pass torch.nn.functional @"\nreturn ext.f(x, y)'),
    program(source="// try { } pass torch.nn.functional at::mm x.softmax(1)"),
    '"""Does not try, pass or torch.relu."""\n' + program(),
    program("return ext.f(x, t.empty_like(y))", "import torch as t"),
    program(top="from torch import nn", init="self.p = nn.Parameter(torch.zeros(2))"),
    program(top="from torch.nn import Module", base="Module"),
    program("n: Optional[int] = 1\nreturn ext.f(x, y)", "from typing import Optional"),
    program(load="ext = torch.utils.cpp_extension.load_inline('', source)"),
    program(base="torch.nn.Module"),
    program("return a.f(b.f(x, y), y)", load=f"{LOAD}\na = ext\nb = load_inline('b', source)"),
    program("return self.ops.softmax(x)", init="self.ops = ext"),
    program(init="self.w = nn.Parameter(torch.empty(2, 3))\nnn.init.kaiming_uniform_(self.w, a=2)"),
    program(init="self.w = nn.ParameterList([nn.Parameter(torch.ones(2) * math.pi)])"),
    program("x = x.contiguous().view(-1).transpose(0, 1)\nreturn ext.f(x, y).to(torch.float32)"),
    program("n, m = x.shape\nk = (n + 3) // 4 * m\nreturn ext.f(x, y).view(k)"),
    program("if (n := x.numel()) > 3:\n    n = n + 1\nreturn ext.f(x, y)"),
    program("return launch(x, y)", "def launch(a, b):\n    return ext.f(a, b)"),
    program("with torch.no_grad():\n    return g(x)", "@torch.no_grad()\ndef g(x): return x"),
    program("a, b = x.chunk(2, dim=-1)\nreturn ext.f(a, b.movedim(0, 1).type_as(y))"),
    program("return ext.f(x, y)", 'T = "{{ {w:.2f} }} a[0].b".format(w=1.5)'),
    program("if x.dim() != 2:\n    raise ValueError(f'{x.shape}')\nreturn ext.f(x, y)"),
    program(top="import torch.nn.functional as F"),
    program("import math\nreturn ext.f(x, math.pi * y)", "import os, sys as s\nimport numpy as np"),
    program() + CARRIED,
    program("return ext.f(x, y)", "class Model(nn.Module):\n    def forward(self, x, y):\n"
            "        return torch.relu(x) @ y", init="self.w = torch.cat([torch.ones(2)] * 2)"),
    program("return self.a.f(x, self.b.f(y, x))", HELPER, init="self.a = ext\nself.b = self.a"),
    program("return (ops or ext).f(x, y)", "ops = None\nops = ext"),
    program("return ext.f(x, y)", load="def build():\n    return load_inline('k', source, "
            "functions=['f'])\n\n\next = build()"),
    program("return launch(x, y)", "def launch(a, b, module=ext):\n    return module.f(a, b)"),
    program("return self.part(x)", HELPER, init="self.part = Helper(3)"),
    program("return self.part.forward(x * self.part.scale)", HELPER,
            init="self.part: Helper = Helper(3)\nself.scale = 2"),
    program("n: int\ny: np.ndarray = self.k.f(x, y)\nreturn y",
            "from types import ModuleType\nimport numpy as np\n\n\n"
            "def same(m: ModuleType, *a: object, **k: type) -> ModuleType | None: return m",
            init="self.k: ModuleType = ext\nself.n: object = same(3)"),
    program("return x if isinstance(self.part, Helper) else self.part(x)", HELPER,
            init="self.part = nn.Sequential(Helper(3), Helper(3))"),
    program("return self.parts[0](x)", HELPER,
            init="self.parts = nn.ModuleList([Helper(3) for _ in range(2)])"),
    "from __future__ import annotations\n" + program(),
    program("return ext.f(x, y) * sqrt(2)", "from math import sqrt, pi as p"),
    program(top="from typing import Any, Callable\nfrom torch.nn.init import kaiming_uniform_",
            init="kaiming_uniform_(nn.Parameter(torch.empty(2, 3)))"),
    program(top="from torch.nn import ParameterList\nfrom torch.nn.parameter import Parameter",
            init="self.w = ParameterList([Parameter(torch.zeros(2).uniform_(-1, 1))])"),
    program("x = torch.flatten(x, 1).type(torch.half).cuda()\nreturn ext.f(x.repeat(2, 1), y)"),
    program("k = 1 << (next(iter(x.shape)) - 1).bit_length()\nreturn ext.f(x, y.select(0, k))",
            end="@torch.no_grad()\ndef g(self, x):\n    return self.f(x)"),
    program("raise NotImplementedError(repr(x))", "from torch import nn as u, no_grad",
            end="@no_grad()\ndef g(self): return self.n\n@torch.inference_mode\n"
                "def h(self): return self.n"),
]


@pytest.mark.parametrize("rule", HACKS)
def test_a_program_that_breaks_one_rule_is_a_hack_of_that_rule_with_its_line(rule):
    for code in HACKS[rule]:
        found = kevin.find_hacks(code)
        assert found is not None and found[0] == rule, (found, code)
        assert found[1].startswith("line ")


@pytest.mark.parametrize("trick", SHADOWED)
def test_neither_shadowing_nor_depth_is_a_way_around_the_filter(trick):
    assert kevin.find_hacks(SHADOWED[trick]) is not None


def test_an_honest_program_passes_and_a_gpu_candidate_needs_a_kernel_of_its_own():
    for code in HONEST:
        assert kevin.find_hacks(code) is None, code
    assert kevin.find_hacks(program(), "cuda")[0] == "no kernel"


def pace():
    """CPU seconds of 25 million additions, by which machines differ."""
    start = time.process_time()
    sum(range(25_000_000))
    return time.process_time() - start


def test_a_program_of_100_kilobytes_is_looked_through_in_seconds():
    chains = "\n".join(f"a{i} = x" + ".T" * 300 for i in range(160))
    names = " ".join(f"f{i}();" for i in range(13_000))
    log = "\n".join(f"cuda_source:1:1: error: 'f{i}' was not declared" for i in range(13_000))
    before, start = pace(), time.process_time()
    accents = "\u0315\u0300" * 24_900
    assert kevin.find_hacks(f"def f(a{accents} 1):")[0] == "syntax", "it took minutes"
    for body in ("a = [" + "A()," * 24_000 + "]", chains):
        kevin.find_hacks(program(body, "class A(nn.Module):\n    x = 1"))
    assert kevin.syntax_error(log, names) == ""
    spent = time.process_time() - start
    assert spent < max(3.5, 5 * (before + pace())), "they took 4, 10 and 28 seconds"


@shared
@pytest.mark.parametrize(("kind", "device"), [("honest_cpu", "cpu"), ("honest", "cuda")])
def test_the_collected_honest_candidates_pass_the_filter(kind, device):
    files = sorted((CANDIDATES / kind).glob("ok__*.py"))
    files = [f for f in files if "linear_holder" not in f.name]  # it has a banned layer
    found = {f.name: kevin.find_hacks(f.read_text(), device) for f in files}
    assert files and set(found.values()) == {None}, found


ALLOWED_SYMBOLS = """_ZNKRSt7__cxx1119basic_ostringstreamIcE3strEv
    memcpy memcpy@GLIBC_2.14 malloc __cxa_throw _ZSt9terminatev _Znwm _ZdlPvm own
    _ZN2at4_ops19empty_memory_format4callE _ZN2at4_ops5zeros4callE _ZN2at4_ops4view4callE
    _ZN2at4_ops5copy_4callE _ZN2at4_ops10view_dtype4callE _ZN2at4_ops9zeros_out4callE
    _ZN2at4_ops9transpose4callE _ZNK2at10TensorBase8is_contiguousE
    _ZN3c106detail14torchCheckFailEPKc cudaLaunchKernel cudaGetLastError exit strtol
    omp_get_max_threads cudaMemcpy cudaMemset2DAsync cudaOccupancyMaxActiveClusters
    cudaGetDeviceCount _ZN2at4_ops5chunk4callE _ZN2at4_ops12split_Tensor4callE
    _ZN2at4cuda26getCurrentDevicePropertiesEv _ZN3c10lsERSoNS_11DispatchKeyE
    _ZN2at38globalDeprecatedTypePropertiesRegistryEv cudaSetDevice _ZTIN3c105ErrorE _ZTIPKc
    _ZTVN10__cxxabiv120__si_class_type_infoE _ZTISt13runtime_error _ZTVNSt7__cxx1115basic_stringbufE
    _ZTINSt8ios_base7failureB5cxx11E _ZNK2at6Tensor4itemIfEET_v""".split()
DENIED_SYMBOLS = """_ZN3c104impl26raw_local_dispatch_key_setE
    _ZN2at4_ops2mm4callERKNS_6TensorES4_ _ZN2at4_ops8_softmax4callE dlsym dlopen
    _ZN2at4_ops15unfold_backward4callE _ZN2at4_ops9to_sparse4callE
    _ZN2at4_ops10add_Tensor4callE _ZN2at4_ops6linear4callE _ZN2at4_ops5index4callE open fopen system
    fork execve mmap socket getenv _exit quick_exit syscall pthread_create clock_gettime
    PyRun_SimpleString cublasSgemm_v2 cblas_sgemm _ZNSt6thread4joinEv _ZNSt13random_device7_M_finiEv
    _ZN3c1010Dispatcher9singletonEv _ZNSt6chrono3_V212steady_clock3nowEv cudaGraphLaunch
    _ZNSt14basic_ofstreamIcSt11char_traitsIcEE cudaStreamCreateWithFlags
    _ZTVN5torch8autograd9generated11MmBackward0E _ZTVN2at14FunctionalBaseE
    _ZNK2at10TensorBase7grad_fnEv _ZN3c1020ThreadLocalDebugInfo5_pushE
    cudaIpcOpenMemHandle cudaMalloc omp_set_num_threads _ZN3c109ClassType10findMethodERKSs
    _ZTVN3c109TypeErrorE _ZN3c1012GetAllocatorENS_10DeviceTypeE
    _ZNK2at6Tensor7sigmoidEv _ZNK2at6Tensor7flattenENS_7DimnameES1_S1_""".split()


def test_symbols_that_compute_or_reach_outside_are_foreign_and_no_others():
    mixed = [s for pair in zip(DENIED_SYMBOLS, itertools.cycle(ALLOWED_SYMBOLS)) for s in pair]
    core = frozenset(s for s in mixed if not re.search("9ClassType|9TypeError", s))
    found = kevin.foreign_symbols(mixed, frozenset({"own"}), core)
    operators = [f"aten::{name}" for name in (
        "mm", "_softmax", "unfold_backward", "to_sparse", "add_Tensor", "linear", "index",
        "sigmoid", "flatten")]
    assert [s for s in found if s.startswith("aten")] == operators
    plain = [s for s in DENIED_SYMBOLS if not re.search("4_ops|6Tensor", s)]
    assert [s for s in found if not s.startswith("aten")] == plain


# ---- 6. The judge --------------------------------------------------------------------------------

NORM = kevin.Task("X-2", 1, "Norm", "layer_norm", """import torch
import torch.nn as nn

ROWS, COLS = 64, 256

class Model(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.norm = nn.LayerNorm(cols)

    def forward(self, x):
        return self.norm(x)

def get_inputs():
    return [torch.randn(ROWS, COLS)]

def get_init_inputs():
    return [COLS]
""")
KERNELS = """#include <cmath>
using torch::Tensor;
Tensor norm(Tensor x, Tensor g, Tensor b) {
    auto out = torch::empty_like(x);
    const int64_t rows = x.size(0), n = x.size(1);
    const float *pg = g.data_ptr<float>(), *pb = b.data_ptr<float>();
    for (int64_t i = 0; i < rows; ++i) {
        const float* p = x.data_ptr<float>() + i * n;
        float* q = out.data_ptr<float>() + i * n;
        double mean = 0, var = 0;
        for (int64_t j = 0; j < n; ++j) mean += p[j] / (double)n;
        for (int64_t j = 0; j < n; ++j) var += (p[j] - mean) * (p[j] - mean) / n;
        const double scale = 1 / std::sqrt(var + 1e-5);
        for (int64_t j = 0; j < n; ++j) q[j] = (p[j] - mean) * scale * pg[j] + pb[j];
    }
    return out;
}
Tensor wrong(Tensor x, Tensor g, Tensor b) {
    Tensor out = norm(x, g, b);
    out.data_ptr<float>()[out.numel() - 1] += 100;
    return out;
}
Tensor cached(Tensor x, Tensor g, Tensor b) {
    static Tensor kept;
    static const float* place = nullptr;
    if (place != x.data_ptr<float>()) kept = norm(x, g, b);
    place = x.data_ptr<float>();
    return kept;
}
Tensor scribble(Tensor x, Tensor g, Tensor b) {
    Tensor out = norm(x, g, b);
    x.data_ptr<float>()[5] = 0;
    return out;
}
Tensor crash(Tensor x, Tensor g, Tensor b) {
    volatile int* volatile nowhere = nullptr;
    *nowhere = 1;
    return x;
}
Tensor hang(Tensor x, Tensor g, Tensor b) {
    for (volatile bool on = true; on;) {}
    return x;
}
"""
NAMES = re.findall(r"^Tensor (\w+)", KERNELS, re.MULTILINE)


def candidate(expression="ext.norm(x, self.g, self.b)", source=KERNELS, names=NAMES):
    """A program for NORM; one with the same source and names needs no other build."""
    return f'''import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = r"""{source}"""
ext = load_inline(name="k", cpp_sources=source, functions={names!r})

class ModelNew(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.g = nn.Parameter(torch.ones(cols))
        self.b = nn.Parameter(torch.zeros(cols))
        self.ones, self.zeros = torch.ones(cols), torch.zeros(cols)

    def forward(self, x):
        return {expression}
'''


def macro(line):
    """A source with one function f, whose body starts with the line."""
    return ("#define A(x, y) x##y\ntorch::Tensor f(torch::Tensor x, torch::Tensor y) {\n"
            f"    {line}\n    return x;\n}}\n")


@pytest.fixture(scope="module")
def cache():
    """A folder that other users may read, as the children's user layer needs."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield folder


@pytest.fixture(scope="module")
def judge(cache):
    with kevin.Judge("cpu", cache, unsafe=True) as judge:  # judges our own kernels in any case
        yield judge


def judged(judge, code, task=NORM):
    built = judge.submit(code).result()
    return built if isinstance(built, kevin.Verdict) else judge.check(task, built)


def processes(parent=None, marker=None):
    """Ids of the living processes with this parent, or this text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields_ = (folder / "stat").read_text().rpartition(")")[2].split()
            text = (folder / "cmdline").read_bytes().decode(errors="replace")
            if fields_[0] != "Z" and (int(fields_[1]) == parent or marker and marker in text):
                found.append(int(folder.name))
    return found


def test_a_correct_kernel_is_correct_and_its_second_build_compiles_nothing(judge):
    verdict = judged(judge, candidate())
    assert verdict.outcome == "correct", verdict
    assert verdict.speedup > 0 and 0 < verdict.error < 5e-5
    assert verdict.speedup == pytest.approx(verdict.baseline_ms / verdict.runtime_ms)
    assert verdict.device == kevin.cpu_name() and len(set(verdict.seeds)) > 5
    listing = [(f.name, f.stat().st_mtime_ns) for f in (judge.chain.root / "built").iterdir()]
    start, built = time.time(), judge.submit(candidate()).result()
    assert isinstance(built, kevin.Build) and time.time() - start < 2
    again = [(f.name, f.stat().st_mtime_ns) for f in (judge.chain.root / "built").iterdir()]
    assert sorted(f for f in again if not f[0].endswith("lock")) == sorted(
        f for f in listing if not f[0].endswith("lock"))


RUNS = {  # what forward returns: outcome, and a pattern of the message
    "ext.wrong(x, self.g, self.b)": ("incorrect", r"1 of 16384 .* \[63, 255\]: \S+ instead of"),
    "ext.norm(x, self.ones, self.zeros)": ("incorrect", "elements are off"),
    "ext.cached(x, self.g, self.b)": ("incorrect", "elements are off"),
    "ext.scribble(x, self.g, self.b)": ("incorrect", "input was changed"),
    "x": ("incorrect", "new tensor"),
    "ext.norm(x, self.g, self.b).view(-1)": ("incorrect", "shape"),
    "ext.norm(x, self.g, self.b).double()": ("incorrect", "dtype is torch.float64"),
    "ext.norm(x, self.g, self.b).uniform_()": ("hack", "aten::uniform_"),
    "[ext.norm(x, self.g, self.b)]": ("incorrect", "type"),
    "ext.norm(x, self.g, self.b) + self.zeros": ("hack", "__add__"),
    "ext.norm(x)": ("runtime_error", "TypeError"),
    "ext.crash(x, self.g, self.b)": ("runtime_error", "died"),
}


@pytest.mark.parametrize("expression", RUNS)
def test_a_kernel_that_is_not_right_earns_its_verdict(judge, expression):
    outcome, said = RUNS[expression]
    verdict = judged(judge, candidate(expression))
    assert verdict.outcome == outcome and re.search(said, verdict.message), verdict
    assert verdict.speedup == 0


def test_a_constant_that_nobody_computed_is_too_fast(judge):
    zero = NORM.code.replace("ROWS, COLS = 64, 256", "ROWS, COLS = 1024, 1024").replace(
        "return self.norm(x)", "return (self.norm(x) - self.norm(x)).sum(1, keepdim=True)")
    sources = {  # what it does, outcome
        "return torch::zeros({x.size(0), 1}, x.options());": "suspicious",
        """auto out = torch::empty({x.size(0), 1}, x.options());
    const volatile float* p = x.data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i / x.size(1)] = p[i] - p[i];
    return out;""": "correct"}
    for body, outcome in sources.items():
        verdict = judged(judge, candidate("ext.f(x, self.g)", macro(body), ["f"]),
                         replace(NORM, id="X-9", code=zero))
        assert verdict.outcome == outcome, verdict


def test_an_endless_kernel_ends_at_the_limit_and_leaves_no_process(judge, monkeypatch):
    monkeypatch.setattr(kevin, "RUN_TIMEOUT_S", 3.0)
    before, start = processes(judge.zygote.pid), time.time()
    verdict = judged(judge, candidate("ext.hang(x, self.g, self.b)"))
    assert verdict.outcome == "runtime_error" and "within 3 s" in verdict.message
    assert time.time() - start < 20 and processes(judge.zygote.pid) == before == []


def test_a_compile_error_has_the_candidates_own_line_and_no_private_path(judge):
    verdict = judged(judge, candidate(source=macro("int n = y.sizes;\n    undeclared();"),
                                      names=["f"]))
    assert verdict.outcome == "compile_error" and "cpp_source:4:" in verdict.message, verdict
    assert "undeclared" in verdict.message
    assert not re.search(r"/\w+/", verdict.message), verdict.message


BUILT_HACKS = {
    "assembly": ('A(as, m)("nop");', "poisoned word", "cpp_source:3"),
    "thread": ("std::A(thr, ead)([] {}).join();", "library call", "thread"),
    "getenv": ('if (A(std::get, env)("HOME")) return y;', "library call", "getenv"),
    "method": ("return A(x.sig, moid)();", "library call", "aten::sigmoid"),
}


@pytest.mark.parametrize("trick", BUILT_HACKS)
def test_a_macro_does_not_hide_what_the_machine_code_does(judge, trick):
    line, rule, said = BUILT_HACKS[trick]
    source = "#include <cstdlib>\n#include <thread>\n" * (trick != "assembly") + macro(line)
    verdict = judged(judge, candidate(source=source, names=["f"]))
    assert (verdict.outcome, verdict.rule) == ("hack", rule), verdict
    assert said in verdict.message


@slow
def test_token_pasting_does_not_hide_a_library_call(judge):
    verdict = judged(judge, candidate(source=macro("return at::A(m, m)(x, y);"), names=["f"]))
    assert (verdict.outcome, verdict.rule) == ("hack", "library call"), verdict
    assert "aten::mm" in verdict.message


@slow
@shared
def test_no_collected_hack_scores_and_every_honest_candidate_does(judge):
    allowed, wrong = {"ok__linear_holder__matmul_scale_residual.py"}, []
    for kind in ("hacks_cpu", "honest_cpu"):
        for file in sorted((CANDIDATES / kind).glob("*.py")):
            [task] = kevin.load_tasks(str(CANDIDATES / f"tasks_cpu/{file.stem.split('__')[2]}.py"))
            verdict = judged(judge, file.read_text(), task)
            good = verdict.outcome == "correct"
            if good != (kind == "honest_cpu") and file.name not in allowed:
                wrong.append((file.name, verdict.outcome, verdict.rule, verdict.message[:200]))
    assert not wrong, "\n".join(map(str, wrong))


def test_a_judge_that_failed_says_so_and_recovers(judge, monkeypatch):
    judge.zygote.kill()
    judge.zygote.wait()
    assert judged(judge, candidate()).outcome == "correct"

    def fault(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(kevin, "Child", fault)
        verdict = judged(judge, candidate())
    assert verdict.outcome == "judge_error" and "disk full" in verdict.message
    assert kevin.kernel_score(verdict) is None


def test_whose_zygote_dies_is_not_to_blame(judge):
    def load():  # the candidate computes when the zygote is killed, in the first try
        with kevin.Child(judge) as child:
            child.trusted = False
            children.append(child.pid)
            code = "x = 1"
            if len(children) == 1:
                threading.Timer(0.3, judge.zygote.kill).start()
                code = "while True: x = 1"
            return child.ask("load", code=code, names=None)["calls"]

    children = []
    assert judge._retried(load) == [] and len(children) == 2


def test_no_child_is_taken_for_another_after_a_late_answer_of_the_zygote(judge):
    def stopped():
        with kevin.Child(judge) as child:
            child.send_signal(signal.SIGSTOP)
            child.sock.settimeout(0.3)
            order = {"op": "load", "secret": "", "code": "x = 1", "names": None}
            kevin.send_message(child.sock, order)
            with pytest.raises(TimeoutError):
                kevin.receive_message(child.sock)
        return "it stood still"

    assert judge._retried(stopped) == "it stood still"
    pidfd = os.pidfd_open(judge.zygote.pid)
    judge.zygote_sock.settimeout(0.3)
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    with pytest.raises(kevin.JudgeFault, match="timed out"):
        kevin.Child(judge)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    os.close(pidfd)
    time.sleep(0.3)
    assert judge._retried(stopped) == "it stood still"


def test_workers_that_start_ahead_end_with_their_zygote_and_with_the_judge(cache, monkeypatch):
    def served():  # one worker's answer; where two more wait
        with judge.next_worker() as worker:
            started.append(worker.pid)
            reply = worker.ask("load", code="x = 1", names=None)
        assert [spare.result().sock.fileno() > 0 for spare in judge.spares] == [True] * kevin.SPARES
        return reply["calls"]

    started, before = [], len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(kevin.Judge, "_start_worker", lambda judge: kevin.Child(judge))  # no CUDA
    with kevin.Judge("cpu", cache, unsafe=True) as judge:
        monkeypatch.setattr(judge, "device", "cuda")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        assert served() == [] and len(processes(judge.zygote.pid)) == kevin.SPARES
        judge.zygote.kill()
        judge.zygote.wait()
        assert judge._retried(served) == [] and len(set(started)) == 3
        assert len(processes(judge.zygote.pid)) == kevin.SPARES
        open_files = len(os.listdir("/proc/self/fd"))
        assert [served() for _ in range(5)] == [[]] * 5
        assert len(os.listdir("/proc/self/fd")) == open_files
        zygote = judge.zygote.pid
    assert not processes(zygote) and len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_begins_and_ends_threads_is_stopped_as_a_whole():
    code = "import threading\nwhile True: threading.Thread(target=int).start()"
    child, states = object.__new__(kevin.Child), []
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        child.pid, child.pidfd = process.pid, os.pidfd_open(process.pid)
        try:
            for _ in range(300):
                child.send_signal(signal.SIGSTOP)
                states += [stat.read_text().rpartition(") ")[2][0]
                           for stat in Path(f"/proc/{child.pid}/task").glob("*/stat")]
                child.send_signal(signal.SIGCONT)
                time.sleep(0.001 * random.random())
        finally:
            process.kill()
    child.send_signal(signal.SIGSTOP)  # it is gone, which is no error
    os.close(child.pidfd)
    assert set(states) == {"T"} and len(states) >= 300


def cpu_ticks(pid):
    """Clock ticks that a process has computed for, and whether it is stopped."""
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[10]) + int(fields[11]), state == "T"


def test_a_worker_that_starts_stands_still_while_another_is_timed(judge, monkeypatch):
    ask, code = kevin.Child.ask, "for _ in range(5 * 10 ** 7): pass"  # for what CUDA would do
    monkeypatch.setattr(kevin.Child, "ask", lambda child, op, timeout_s: ask(
        child, "load", timeout_s=timeout_s, code=code, names=[]))
    started = judge.starter.submit(judge._start_worker)
    while not judge.starting:
        time.sleep(0.01)
    [child] = judge.starting
    time.sleep(0.2)
    for _ in range(2):
        with judge.stillness():
            before = cpu_ticks(child.pid)
            time.sleep(0.3)
            assert before == cpu_ticks(child.pid) == (before[0], True) and not started.done()
        time.sleep(0.1)
        assert cpu_ticks(child.pid)[0] > before[0]
    assert started.result() is child and not judge.starting
    assert ask(child, "load", code="x = 1", names=None)["calls"] == []
    child.kill()


def test_a_worker_whose_start_fails_is_not_waited_for(judge, monkeypatch):
    monkeypatch.setattr(kevin.Child, "ask", lambda child, op, timeout_s: child.fail("no GPU"))
    with pytest.raises(kevin.JudgeFault, match="no GPU"):
        judge._start_worker()
    with judge.stillness():
        assert not judge.starting and not processes(judge.zygote.pid)


def test_a_start_that_hangs_is_not_waited_for_at_the_end(cache, monkeypatch):
    ask = kevin.Child.ask
    monkeypatch.setattr(kevin.Child, "ask", lambda child, op, timeout_s: ask(
        child, "load", timeout_s=timeout_s, code="while True: x = 1", names=[]))
    with kevin.Judge("cpu", cache, unsafe=True) as judge:
        judge.spares.append(judge.starter.submit(judge._start_worker))
        while not judge.starting:
            time.sleep(0.01)
        spare, start = judge.spares[0], time.time()
    assert time.time() - start < 20 and isinstance(spare.exception(), kevin.JudgeFault)
    assert not judge.starting and not processes(judge.zygote.pid)


class Starting:
    def __init__(self, stops=True):
        self.got, self.stops = [], stops

    def send_signal(self, which):
        self.got.append(which)
        if which == signal.SIGSTOP and not self.stops:
            raise kevin.JudgeFault("the process does not stop")


def test_one_that_does_not_stand_still_keeps_no_other_from_starting(judge, monkeypatch):
    both = Starting(), Starting(stops=False)
    monkeypatch.setattr(judge, "starting", both)
    with pytest.raises(kevin.JudgeFault, match="not stop"), judge.stillness():
        pytest.fail("it is not still")
    assert [one.got for one in both] == [[signal.SIGSTOP, signal.SIGCONT]] * 2
    assert not judge.quiet.locked()


def test_a_new_zygote_ends_no_start_that_someone_waits_for(judge, monkeypatch):
    monkeypatch.setattr(judge, "starting", {other := Starting()})
    judge.zygote.kill()
    judge.zygote.wait()
    assert judged(judge, candidate()).outcome == "correct" and signal.SIGKILL not in other.got


@pytest.mark.parametrize("ms, listen, trusted, stops", [
    (math.inf, False, False, 0), (0.2, False, False, 0), (3.0, True, False, 0),
    (3.0, False, False, 1), (math.inf, False, True, 0), (3.0, True, True, 0),
    (0.2, False, True, 1)])
def test_only_timed_calls_longer_than_a_share_of_the_gpu_stop_what_starts(
        judge, ms, listen, trusted, stops):
    judge.starting.add(other := Starting())
    try:
        with kevin.Subject(judge, NORM) as subject, contextlib.suppress(kevin.Rejected):
            subject.trusted = trusted  # eager's calls, of any length
            kevin.burst(subject, 0, ms, listen)  # who is listened to runs torch's operators
    finally:
        judge.starting.remove(other)
    assert other.got == [signal.SIGSTOP, signal.SIGCONT] * stops


def test_assembly_is_looked_for_in_the_candidates_own_host_code_alone():
    text = """# 1 "/usr/include/a.h"
asm("before");
# 4 "cuda_source" 3
const char* words = "asm(1) __attribute__((section(2)))";
#if 0
asm("device");
#endif
# 9
int fine();
# 2 "/opt/cuda/bin/../other.h"
asm("other");
# 3
asm("other still");
# 12 "cuda_source"
int also_fine();
"""
    trusted = ["/usr", "/opt"]
    assert kevin.host_assembly(text, trusted) == ""
    named = '__attribute__((used, section("x"))) int a;'
    slots = "auto f = a->ob_type->tp_as_number;"
    quotes = """char c = '"'; asm("x"); char d = '"', e = '\\'';"""
    for line in ('asm("x");', 'int f() __asm__("x");', named, slots, "PyTypeObject* t = type;",
                 quotes, '[[gnu::section("x")]] int a;'):
        assert kevin.host_assembly(text + line, trusted) == "cuda_source:12: "
        assert kevin.host_assembly(text + "# 15\n" + line + "\n", trusted) == "cuda_source:15: "
        late = text.replace("int fine();", line)
        assert kevin.host_assembly(late, trusted) == "cuda_source:9: "
    for other in ("./cuda_source", "cpp_source", "/usr/../proc/self/cwd/cuda_source", "/usrx"):
        late = f'{text}# 3 "{other}"\nasm("x");\n'
        assert kevin.host_assembly(late, trusted) == f"{Path(other).name}:3: "


@pytest.mark.parametrize("name", [
    "/proc/self/cwd/own", "/usr/../proc/self/cwd/own", "/dev/fd/{}/own", "/usr/../dev/fd/{}/own"])
def test_a_name_that_means_another_file_in_every_process_is_a_candidates_own(monkeypatch, name):
    monkeypatch.chdir("/usr")  # where the parent would find a trusted file, the compiler its own
    here = os.open("/usr", os.O_RDONLY)
    try:
        name = name.format(here)
        assert os.path.realpath(name) == "/usr/own"
        assert kevin.host_assembly(f'# 3 "{name}"\nasm("x");\n', ["/usr"]) == "own:3: "
    finally:
        os.close(here)


@pytest.mark.parametrize("text", [
    "#line 7", " # 7", "/* a */ # line 7", "/*\n*/ #line 7", "#/*\n*/line 7", "#\\\nline 7",
    "# \\ \nline 7", "%:line 7", "??=line 7", "# /**/ 7", "int a; /*\n a */ /* b */ # 7"])
def test_a_line_directive_is_found_wherever_the_preprocessor_finds_it(text):
    assert kevin.has_line_directive(f"int f();\n{text} \"other.h\"\n"), text
    assert not kevin.has_line_directive(f"int f();\nint g; {text.replace('#', '+')}\n") or (
        "#" not in text), text


@pytest.mark.parametrize("text", ["/**/" * 40 + "\n", "/* */ " * 40, "\n" * 40_000, "<<<" * 20_000,
                                  "\\\n" * 20_000, "#" * 60_000, "*/" * 30_000, " " * 60_000,
                                  "a__attribute((p, 1)), " * 4000, "'" * 60_000, "_" * 60_000])
def test_no_text_makes_the_gates_slow(judge, tmp_path, text):
    start = time.process_time()
    call = {"cpp": [""], "cuda": [text], "functions": [], "flags": [text]}
    judge.chain.write(tmp_path, "k", call)
    kevin.has_line_directive(text)
    kevin.host_assembly(f'# 1 "cuda_source"\n{text} asm', [])
    kevin.syntax_error(text, text)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("text, headers", [
    ("std::map<int, int> a;", {"map"}), ("std::multiset<int> a;", {"set"}),
    ("a << std::setw(3) << std::quoted(b);", {"iomanip"}), ("AT_DISPATCH_ALL_TYPES", set()),
    ("std::unordered_map<int, int> a; cudaMemset(offset, set_of(bitmap));", set())])
def test_nvcc_sees_a_header_that_takes_time_only_if_a_name_of_it_is_there(
        judge, tmp_path, text, headers):
    call = {"cpp": ["torch::Tensor f();"], "cuda": [text], "functions": ["f"], "flags": []}
    judge.chain.write(tmp_path, "k", call)
    found = set(re.findall("#include <(.*)>", (tmp_path / "cuda.cu").read_text()))
    assert found & {"map", "set", "iomanip"} == headers
    assert ("ATen/Dispatch.h" in found) == ("DISPATCH" in text)
    call |= {"cuda": ["TABLE a;"], "flags": ["-DTABLE=std::map<int,int>"]}
    judge.chain.write(tmp_path, "k", call)
    assert "#include <map>" in (tmp_path / "cuda.cu").read_text(), "a macro's text counts"


def test_a_long_chain_of_attributes_is_no_work_for_the_filter():
    code = program("return " + " + ".join(["x" + ".T" * 300] * 60))
    start = time.process_time()
    assert kevin.find_hacks(code) is None
    assert time.process_time() - start < 3


def test_honest_bindings_old_macros_and_empty_linker_flags_are_no_hacks(judge):
    source = KERNELS.partition("Tensor wrong")[0] + r"""
#define CHECK_CPU(x) TORCH_CHECK(!x.type().is_cuda(), #x " must be on the CPU")
int64_t rows(Tensor x) { return x.size(0); }
Tensor many(Tensor x, Tensor g, Tensor b, unsigned n, size_t m, torch::Dtype type,
            at::IntArrayRef sizes, std::array<int64_t, 2> pair, std::tuple<int, double> two) {
    CHECK_CPU(x);
    at::NoGradGuard no_grad;
    TORCH_CHECK(pair[1] == 8 && std::get<1>(two) == 2.5);
    std::map<int64_t, std::set<int>> seen;
    seen[x.chunk(2, 1)[0].size(1)] = {static_cast<int>(n)};
    TORCH_CHECK(seen.count(128) && sizes[1] == 7 && m == 3);
    TORCH_CHECK(type == torch::kFloat32, "got ", type);
    const at::DeviceGuard guard(x.device());
    std::ostringstream text;
    text << std::setprecision(3) << WIDTH + NOTHING;
    TORCH_CHECK(text.str() == "130");
    return norm(x, g, b);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.doc() = "many";
    m.def("rows", &rows, "Counts rows", py::arg("x"));
    m.def("many", &many, py::call_guard<py::gil_scoped_release>());
}"""
    call = "many(x, self.g, self.b, rows(x), 3, torch.float32, [1, 7], (5, 8), (1, 2.5))"
    for flags, outcome in (('["", "-fopenmp"]', "correct"), ('["-lcublas"]', "hack")):
        options = f'extra_ldflags={flags}, extra_cflags=["-O3 -DWIDTH=129", "-D", "NOTHING"]'
        code = candidate(call, source, []).replace(
            "functions=[])", f"{options})\nmany, rows = ext.many, ext.rows")
        verdict = judged(judge, code)
        assert verdict.outcome == outcome, verdict.message


@pytest.mark.parametrize("space", ["", "own::"])
def test_a_function_without_a_definition_is_a_compile_error_and_no_hack(judge, space):
    declared = "torch::Tensor helper(torch::Tensor x);"
    declared = f"namespace own {{ {declared} }}" if space else declared
    source = f"#include <torch/extension.h>\n{declared}\n" + macro(f"return {space}helper(x);")
    verdict = judged(judge, candidate(source=source, names=["f"]))
    assert verdict.outcome == "compile_error", verdict
    assert f"undefined reference to {space}helper(at::Tensor)" in verdict.message


def test_a_worker_that_lies_and_a_clock_that_stood_still_earn_nothing(judge, monkeypatch):
    with kevin.Subject(judge, NORM, judge.submit(candidate()).result()) as subject:
        subject.run(1, 2)
        subject.slots[0][1].fill_(255)  # no byte was written
        with pytest.raises(kevin.Rejected, match="16384 of 16384"):
            subject.error(1, 2)
        subject.run(1, 2)
        subject.claims[0]["strides"] = [256.0, 1.0]  # equal, and no number of elements
        assert subject.error(1, 2)[0] < 5e-5
    real = kevin.burst
    for clock, rule in ((1e-9, "too fast"), (9.0, "clock")):  # of work that no event saw
        monkeypatch.setattr(kevin, "burst", lambda *call, clock=clock, **listen: (
            1e-9, clock, real(*call, **listen)[2]))
        verdict = judged(judge, candidate())
        assert (verdict.outcome, verdict.rule) == ("suspicious", rule), verdict
        assert kevin.kernel_score(verdict) == 0


@pytest.mark.parametrize(("noisy", "outcome"), [
    (2, "correct"), (4, "correct"), (5, "suspicious")])
def test_a_clock_that_disagrees_is_asked_again_before_anyone_is_accused(
        judge, monkeypatch, noisy, outcome):
    real, calls = kevin.measure, []

    def disturbed(*arguments):
        calls.append(1)
        (ms, _), *eager = real(*arguments)
        return [(ms, 9.0 if len(calls) <= noisy else 0.0), *eager]

    monkeypatch.setattr(kevin, "measure", disturbed)
    assert judged(judge, candidate()).outcome == outcome and len(calls) == min(noisy + 1, 5)


def test_a_machine_that_cannot_contain_a_child_refuses_it(judge, monkeypatch):
    receive, weak = kevin.receive_message, {"layers": {"pids": "on", "landlock": "not here"}}
    monkeypatch.setattr(kevin, "receive_message", lambda sock, max_fds=0: (
        lambda message, fds: (weak if "layers" in message else message, fds))(
            *receive(sock, max_fds)))
    kevin.Child(judge).kill()
    monkeypatch.setattr(judge, "unsafe", False)
    with pytest.raises(kevin.UserError, match="not here.*--unsafe"):
        kevin.Child(judge)


def test_a_task_that_raises_is_the_users_error_and_names_the_task(judge):
    task = replace(NORM, id="X-9", code=NORM.code.replace("self.norm(x)", "x.nothing()"))
    build = judge.submit(candidate()).result()
    with pytest.raises(kevin.UserError, match="X-9.*nothing"):
        judge.check(task, build)


# What a process in the sandbox can do: Python code that a child runs in a folder of its own.


@pytest.fixture
def contained(judge, tmp_path):
    """contained(layer, code, wait=True): the code's output, or the child; needs the layer."""
    children = []

    def run(layers, code, wait=True):
        folder = tmp_path / "own"
        folder.mkdir()
        folder.chmod(0o777)
        children.append(kevin.Child(judge, folder))
        for layer in layers:
            if children[0].layers.get(layer) != "on":
                pytest.skip(f"sandbox layer {layer}: {children[0].layers.get(layer)}")
        order = {"folder": str(folder), "stages": [[[sys.executable, "-c", code]]]}
        if not wait:
            kevin.send_message(children[0].sock, {"op": "build", "secret": "", **order})
            return children[0]
        children[0].ask("build", (), 30, **order)
        return (folder / "log").read_text()

    yield run
    for child in children:
        with contextlib.suppress(OSError):
            child.kill()


TRY = """
import os, socket, sys
def attempt(name, action):
    try:
        action()
        print(name, "done")
    except OSError as e:
        print(name, "refused", flush=True)
"""


def test_a_child_has_no_network(contained):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        socket.create_connection(address, timeout=5).close()  # it does listen
        output = contained(["network"], TRY + f"""
attempt("tcp", lambda: socket.create_connection({address!r}, timeout=5))
attempt("local", lambda: socket.socketpair())
print(os.readlink("/proc/self/ns/net"))
""")
    tcp, local, namespace = output.splitlines()
    assert (tcp, local) == ("tcp refused", "local done")
    assert namespace.startswith("net:") and namespace != os.readlink("/proc/self/ns/net")


def test_a_child_reads_and_writes_what_it_was_given_and_nothing_else(contained, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("seed")
    secret.chmod(0o644)
    output = contained(["landlock"], TRY + f"""
attempt("torch", lambda: open({torch.__file__!r}).read())
attempt("secret", lambda: open({str(secret)!r}).read())
attempt("tasks", lambda: open({str(ROOT / "tasks.jsonl")!r}).read())
attempt("folder", lambda: os.listdir({str(tmp_path)!r}))
attempt("own", lambda: open("mine", "w").write("x"))
attempt("beside", lambda: open("../beside", "w").write("x"))
attempt("tmp", lambda: open("/tmp/kevin_escape", "w").write("x"))
attempt("link", lambda: os.link({str(secret)!r}, "linked"))
""")
    allowed = {line.split()[0] for line in output.splitlines() if line.endswith("done")}
    assert allowed == {"torch", "own"}, output
    assert len(output.splitlines()) == 8 and not (tmp_path / "beside").exists()


def test_a_child_cannot_signal_its_makers(contained, judge):
    pids = [os.getpid(), judge.zygote.pid]
    output = contained(["pids"], TRY + "\n".join(
        f"attempt({i}, lambda: os.kill({pid}, 0))" for i, pid in enumerate(pids)))
    assert output.split("\n")[:2] == ["0 refused", "1 refused"], output


def test_killing_a_child_ends_its_daemon(contained):
    marker = f"kevin-daemon-{random.SystemRandom().getrandbits(64)}"
    child = contained(["pids"], f"""import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execlp({sys.executable!r}, "{marker}", "-c", "import time; time.sleep(60)", "{marker}")
    os._exit(0)
time.sleep(60)
""", wait=False)
    deadline = time.time() + 20
    while len(processes(marker=marker)) < 2 and time.time() < deadline:
        time.sleep(0.05)
    assert len(processes(marker=marker)) == 2, "the daemon did not start"
    child.kill()
    assert processes(marker=marker) == []


def test_a_child_cannot_write_an_endless_file(contained):
    output = contained(["limits"], TRY + f"""
file = open("big", "wb", buffering=0)
attempt("below", lambda: os.pwrite(file.fileno(), b"x", {kevin.CHILD_FILE - 1}))
attempt("above", lambda: os.pwrite(file.fileno(), b"x", {kevin.CHILD_FILE}))
""")
    assert output.split("\n")[:2] == ["below done", "above refused"], output


MESSAGES = {  # what a hostile peer may send, and what receive_message does
    "two megabytes": (b'"' + b"x" * (2 << 20), ValueError),
    "no JSON": (b"{", ValueError),
    "no text": (b"\xff\xfe", ValueError),
    "a list": (b"[1]", ValueError),
    "deep": (b"[" * 200_000, (ValueError, RecursionError)),
    "nothing": (b"", EOFError),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_hostile_message_is_an_error_of_its_sender(kind):
    payload, error = MESSAGES[kind]

    def serve(peer):
        with peer, contextlib.suppress(OSError):
            peer.sendall(payload)

    for expected in (error, kevin.Rejected):
        ours, peer = socket.socketpair()
        child = kevin.Child.__new__(kevin.Child)  # without a process
        child.zygote = types.SimpleNamespace(poll=lambda: None, wait=lambda timeout: None)
        child.sock, child.trusted, child.deadline = ours, False, float("inf")
        thread = threading.Thread(target=serve, args=(peer,))
        thread.start()
        with ours, pytest.raises(expected):
            kevin.receive_message(ours) if expected is error else child.ask("run")
        thread.join()


def column(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


NAN, INF = float("nan"), float("inf")
WAVE = torch.linspace(-3, 3, 100_001, dtype=torch.float64).sin()
COMPARISONS = {  # output, truth: accepted? (eager is the truth in float32)
    "equal": (WAVE, WAVE, True),
    "rounded": (WAVE.float(), WAVE, True),
    "bf16": (WAVE.bfloat16(), WAVE, False),
    "one bad element": (WAVE.index_fill(0, torch.tensor([50_000]), 0.006), WAVE, False),
    "one fair element": (WAVE.index_fill(0, torch.tensor([50_000]), 0.003), WAVE, True),
    "noise within the bound": (WAVE + 3e-5 * WAVE.std() * WAVE.cos(), WAVE, True),
    "noise beyond the bound": (WAVE * (1 + 1e-4), WAVE, False),
    "all NaN": (WAVE * NAN, WAVE, False),
    "NaN where it belongs": (column(NAN, 1, 2), column(NAN, 1, 2), True),
    "NaN elsewhere": (column(1, NAN, 2), column(NAN, 1, 2), False),
    "NaN for infinity": (column(NAN, 1, 2), column(INF, 1, 2), False),
    "infinity": (column(INF, 1, -INF), column(INF, 1, -INF), True),
    "a wrong number beside it": (column(INF, 1, 2.01), column(INF, 1, 2), False),
    "the other infinity": (column(-INF, 1, 2), column(INF, 1, 2), False),
    "a number for infinity": (column(1e30, 1, 2), column(INF, 1, 2), False),
    "only NaN": (column(NAN, NAN), column(NAN, NAN), True),
    "constant": (column(2, 2, 2), column(2, 2, 2), True),
    "constant and wrong": (column(2, 2, 2.01), column(2, 2, 2), False),
    "zero": (column(0, 0), column(0, 0), True),
    "not zero": (column(0, 1e-3), column(0, 0), False),
    "integers": (column(1, 2, dtype=torch.int64), column(1, 2, dtype=torch.int64), True),
    "other integers": (column(1, 3, dtype=torch.int64), column(1, 2, dtype=torch.int64), False),
    "truth values": (column(1, 0, dtype=torch.bool), column(1, 1, dtype=torch.bool), False),
}


@pytest.mark.parametrize("case", COMPARISONS)
def test_outputs_compare_as_a_person_would_say(case):
    output, truth, accepted = COMPARISONS[case]
    eager = truth.float() if truth.is_floating_point() else truth
    error, problem = kevin.compare(output, truth, eager)
    assert (problem == "") == accepted, problem
    if accepted and truth.isfinite().all() and truth.is_floating_point() and truth.std() > 0:
        exact = ((output - truth) ** 2).mean().sqrt() / truth.std()
        assert error == pytest.approx(exact.item(), rel=0.01)


def test_a_task_that_eager_gets_wrong_itself_is_judged_by_that():
    noisy = WAVE * (1 + 1e-3)
    assert kevin.compare(noisy, WAVE, WAVE.float())[1] != ""
    assert kevin.compare(noisy, WAVE, noisy)[1] == ""


class Holder(torch.nn.Module):
    """Registers the parameters of a layer norm and a linear layer under other names."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.shift = torch.nn.Parameter(torch.zeros(8))
        self.matrix = torch.nn.Parameter(torch.nn.Linear(8, 8, bias=False).weight.detach().clone())


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8, bias=False)


def test_constant_parameters_become_random_and_equal_for_equal_registrations():
    models = [kevin.seeded_model(c, list, 5) for c in (Holder, Layers, Layers)]
    first, second, third = ([p.detach() for p in m.parameters()] for m in models)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, second, third))
    assert all(p.std() > 0.05 for p in first) and not torch.equal(first[0] - 1, first[1])
    other = list(kevin.seeded_model(Layers, list, 6).parameters())
    assert not any(map(torch.equal, first, other))


def test_only_a_parameter_that_is_constant_to_its_end_becomes_random():
    class Long(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.start = torch.nn.Parameter(torch.cat([torch.ones(100), torch.zeros(1)]))
            self.whole = torch.nn.Parameter(torch.full((10, 10), 2.0))
            self.short = torch.nn.Parameter(torch.ones(100, dtype=torch.float16))

    start, whole, short = (p.detach() for p in kevin.seeded_model(Long, list, 5).parameters())
    assert start.sum() == 100 and start[-1] == 0
    assert len(whole.unique()) > 50 and 2.0 <= whole.min() and whole.max() <= 2.5
    assert short.dtype == torch.float16 and len(short.unique()) > 20 and short.min() >= 1


def test_a_parameter_that_is_no_row_of_memory_is_made_random_too():
    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.randn(3, 4).t())
            self.ones = torch.nn.Parameter(torch.ones(3, 4).t())

    matrix, ones = kevin.seeded_model(Turned, list, 5).parameters()
    assert matrix.shape == (4, 3) and ones.std() > 0.05


def test_two_processes_draw_equal_inputs_and_weights_from_equal_seeds():
    code = f"""import sys; sys.path.insert(0, {str(ROOT)!r})
import kevin, torch
space = {{}}
exec({NORM.code!r}, space)
drawn = kevin.seeded_inputs(space["get_inputs"], 3, "cpu")
drawn += kevin.seeded_model(space["Model"], space["get_init_inputs"], 4).parameters()
print(kevin.stable_seed("a", 1), *[t.double().sum().item().hex() for t in drawn])
print(sorted({{"transformers", "peft", "accelerate"}} & set(sys.modules)))"""
    drawn, loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                                   check=True).stdout.splitlines()
    space = {}
    exec(NORM.code, space)
    here = kevin.seeded_inputs(space["get_inputs"], 3, "cpu")
    here += kevin.seeded_model(space["Model"], space["get_init_inputs"], 4).parameters()
    assert drawn.split() == [str(kevin.stable_seed("a", 1)),
                             *[t.double().sum().item().hex() for t in here]]
    assert loaded == "[]", "importing kevin must stay cheap: the zygote does it"


# An exploit of our own for each class that no table above holds: A no own work, B libraries, D the
# answers of others, E numerics, F caches, phases, G time, H measurer, I global state, J processes.

CHEATS = KERNELS.partition("Tensor wrong")[0] + r"""
#include <c10/core/DefaultDtype.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#define CHEAT(name) Tensor name(Tensor x, Tensor g, Tensor b)
static int loaded = std::printf("{\"ok\": true, \"ms\": [], \"ops\": []}\n"), calls = 0;
static float* values(Tensor t) { return t.data_ptr<float>(); }
static Tensor like(Tensor x, at::ScalarType type) {
    return torch::empty(x.sizes(), x.options().dtype(type));
}
CHEAT(nothing) { return torch::empty_like(x); }
CHEAT(leftover) {
    std::vector<Tensor> blocks;
    do blocks.push_back(torch::empty_like(x));
    while (blocks.size() < 32 && std::fabs(std::fabs(values(blocks.back())[0]) - 5) >= 5);
    return blocks.back();
}
CHEAT(zeroed) { return norm(x.zero_(), g, b); }
CHEAT(nans) { return torch::full_like(x, NAN); }
CHEAT(half_rows) {
    Tensor out = torch::empty_like(x);
    for (int i : {0, 128}) out.narrow(1, i, 128).copy_(norm(
        x.narrow(1, i, 128).contiguous(), g.narrow(0, i, 128), b.narrow(0, i, 128)));
    return out;
}
CHEAT(most_rows) { Tensor out = norm(x, g, b); out.narrow(0, 63, 1).fill_(9); return out; }
CHEAT(halves) { return norm(x, g, b).copy_(like(x, torch::kFloat16).copy_(norm(x, g, b))); }
CHEAT(doubles) { return like(x, torch::kFloat64).copy_(norm(x, g, b)); }
CHEAT(columns) { return torch::empty({x.size(1), x.size(0)}).t().copy_(norm(x, g, b)); }
static std::map<int64_t, Tensor> kept;
static Tensor once(int64_t key, Tensor x, Tensor g, Tensor b) {
    if (!kept.count(key)) kept[key] = norm(x, g, b);
    return kept[key].clone();
}
CHEAT(by_address) { return once((int64_t)values(x), x, g, b); }
CHEAT(by_shape) { return once(x.numel(), x, g, b); }
CHEAT(at_first) { return once(++calls < 10 ? -calls : -9, x, g, b); }
CHEAT(some) { return ++calls < 9 || calls % 4 == 0 ? norm(x, g, b) : torch::zeros_like(x); }
CHEAT(warm_slot) {
    static float* place = values(x);
    return values(x) == place ? norm(x, g, b) : torch::zeros_like(x);
}
CHEAT(wide_default) {
    c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
    return norm(x, g, b);
}
static float* place(Tensor x) { return values(x) + x.numel(); }  // of the output in shared memory
CHEAT(in_its_place) {
    Tensor out = norm(x, g, b);
    std::memcpy(place(x), values(out), x.nbytes());
    return torch::empty_like(x).fill_(1);
}
CHEAT(for_all) {  // the first call leaves the answers of all in their places
    static Tensor first = x;
    for (int i = 0; values(x) == values(first) && i < 64; ++i)
        std::memcpy(place(x) + 2 * i * x.numel(), values(norm(x, g, b)), x.nbytes());
    return torch::empty_like(x).fill_(2);
}
CHEAT(in_pairs) {  // the first call works for the next one too, whose inputs lie behind its own
    static std::map<const float*, Tensor> ready;
    if (!ready.count(values(x))) {
        const float* behind = values(x) + 2 * x.numel();
        Tensor next = torch::empty_like(x);
        std::memcpy(values(next), behind, x.nbytes());
        ready = {{values(x), norm(x, g, b)}, {behind, norm(next, g, b)}};
    }
    Tensor out = ready[values(x)];
    ready.erase(values(x));
    return out;
}
CHEAT(kept_input) {  // what the next call reads, as it was at the first
    static Tensor first = x.clone();
    Tensor out = norm(x, g, b);
    x.set_data(first);
    return out;
}
CHEAT(slow_start) {
    if (++calls < 12) for (volatile int i = 0; i < 20000000;) i = i + 1;
    return norm(x, g, b);
}
CHEAT(tidy) {
    struct Late { ~Late() { std::printf("{\"ok\": true}"), std::exit(0); } };
    static Late late;
    return norm(x, g, b);
}
static void pay(void* owed) {  // when the output is let go
    Tensor* all = (Tensor*)owed;
    std::memcpy(place(all[0]), values(norm(all[0], all[1], all[2])), all[0].nbytes());
    std::free(all[3].data_ptr());
    delete[] all;
}
static void keep_at(Tensor t, void* memory, void* context, void (*end)(void*)) {
    t.storage().set_data_ptr_noswap(c10::DataPtr(memory, context, end, t.device()));
}
CHEAT(owed) {
    void* memory = std::malloc(x.nbytes() + 64);
    Tensor out = torch::empty_like(x), same = torch::empty_like(x);
    keep_at(same, memory, nullptr, [](void*) {});
    keep_at(out, memory, new Tensor[4]{x, g, b, same}, pay);
    return out;
}
CHEAT(laid_over) {
    Tensor out = torch::empty_like(x);
    keep_at(out, place(x), nullptr, [](void*) {});
    return out.copy_(norm(x, g, b));
}
CHEAT(one_buffer) {  // the same memory for all calls, beginning somewhere else each time
    static char* buffer = (char*)std::malloc(x.nbytes() + (1 << 20));
    Tensor out = torch::empty_like(x);
    int64_t before = 64 * (++calls % 8192);
    keep_at(out, buffer + (1 << 20) - before, nullptr, [](void*) {});
    out.storage().set_nbytes(x.nbytes() + before);
    out.unsafeGetTensorImpl()->set_storage_offset(before / 4);
    return out.copy_(norm(x, g, b));
}
CHEAT(forged) {
    for (int fd = 3; fd < 64; ++fd) {
        stderr->_fileno = fd;
        std::fputs("{\"ok\": true, \"ms\": [], \"ops\": [], \"claims\": []}", stderr);
    }
    return norm(x, g, b);
}
CHEAT(quit) { std::abort(); }
CHEAT(leave) { std::exit(0); }
CHEAT(loud) {
    for (int i = 0; i < 10000; ++i) std::printf("%01000d\n", i);
    std::fflush(stdout);
    return norm(x, g, b);
}
"""


def cheat(call, **changes):
    """A program around CHEATS; call is one of its functions or all that forward returns."""
    names = ["norm", *re.findall(r"^CHEAT\((\w+)\)", CHEATS, re.MULTILINE)]
    code = candidate(f"ext.{call}(x, self.g, self.b)" if call in names else call, CHEATS, names)
    marks = {"top": "\nclass ModelNew", "init": "\n    def forward", "load": "functions="}
    for place, text in changes.items():
        code = code.replace(marks[place], text + marks[place])
    return code


def built(source, names=("f",)):
    return candidate(source=source, names=[*names])


def spelt_out(source):
    numbers = [*map(ord, source)]
    return built("@").replace('r"""@"""', f'"".join(["{{:c}}".format(i) for i in {numbers}])')


DECORATED = "\nop = ext\n\ndef give(f):\n    return torch\n\n@give\ndef op(x):\n    return x\n"
UNBOUND = "        ModelNew.view(torch)\n\n    def view(self):\n        return self.ops\n"
TAKE = """
class Take(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(self.fail, always_call=True)

    def forward(self, *values):
        return next(iter([]))

    def fail(self, *values):
        raise ValueError("hidden")

"""
REPORTER = """#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
struct Hook : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t, size_t, size_t, c10::Device) override {}
    bool memoryProfilingEnabled() const override { return true; }
};
static bool on = (c10::ThreadLocalDebugInfo::_push(
    c10::DebugInfoKind::PROFILER_STATE, std::make_shared<Hook>()), true);
"""
MATCH = "        match torch:\n            case ext:\n                self.m = ext.matmul\n"
CALLS_C = "#include <dlfcn.h>\n#include <sys/mman.h>\n#include <unistd.h>\n" + macro(
    'timespec now; pthread_t thread; clock_gettime(0, &now);\n    if (!dlopen("", 1)) fork();\n'
    "    pthread_create(&thread, nullptr, nullptr, nullptr);\n    mprotect(&now, 4096, 7);")
CALLS_CXX = "#include <bits/basic_file.h>\n#include <c10/core/CPUAllocator.h>\n" + macro(
    'pthread_mutex_t m;\n    pybind11::module_::import("torch");\n'
    "    c10::SetCPUAllocator(c10::GetCPUAllocator(), 255);\n    std::__basic_file<char>(&m).fd();")
RIVALS = """#include <ATen/Parallel.h>
#include <future>
""" + macro("""
    at::set_num_threads(8);
    try { TORCH_CHECK(x.numel() < 0); } catch (const c10::Error&) { return at::softmax(x, 1); }
    std::async(std::launch::async, [] {}).get();""")
REGISTERED = """#include <ATen/core/dispatch/Dispatcher.h>
static auto own = c10::Dispatcher::singleton().registerFallback(
    c10::DispatchKey::CPU, c10::KernelFunction(), "");
""" + macro("")
CODE_BYTES = '__attribute__((section(".text#"))) const unsigned char code[] = {0x0f, 0x05, 0xc3};\n'
LATE = """
    def promise(self, x):
        out = torch.empty_like(x)
        self.owed.append((x, out))
        return out

    def parameters(self, recurse=True):
        for x, out in self.owed:
            out.copy_(ext.norm(x, self.g, self.b))
        self.owed = []
        return [self.g, self.b]
"""
WRONG = "elements are off"
OBJECTS = r"""
pybind11::object product(pybind11::object a, pybind11::object b) {
    return pybind11::reinterpret_steal<pybind11::object>(
        a.ptr()->ob_type->tp_as_number->nb_multiply(a.ptr(), b.ptr()));
}"""
ACCESSOR = """pybind11::object get(pybind11::object o, std::string name) {
    return %s(o, name.c_str());
}"""
MANGLED_GETATTR = """extern "C" void* _ZN8pybind117getattrENS_6handleEPKc(
    void* result, void* object, const char* name);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("get", [](pybind11::object o) {
        pybind11::object found;
        _ZN8pybind117getattrENS_6handleEPKc(&found, o.ptr(), "relu");
        return found; });
}"""
TYPE_OF = "pybind11::object get(pybind11::object o) { return pybind11::type::of(o); }"
BY_TEXT = """        self.{0}

    def get_submodule(self, name):
        return nn.init.uniform_
"""
GETATTR = """PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("__getattr__", [](std::string name) { return pybind11::dict(); });
}"""
NUMBERS = """std::vector<float> give(torch::Tensor x) {
    return {x.data_ptr<float>(), x.data_ptr<float>() + x.numel()};
}"""
HANDED = """pybind11::object give(pybind11::object o) { return o; }
pybind11::object __torch_function__(pybind11::object f, pybind11::object, pybind11::object) {
    return f;
}"""
DUMMY = """extern "C" __attribute__((visibility("default"))) void* dlsym(void*, const char*) {
    return nullptr;
}
""" + macro('TORCH_CHECK(dlsym(nullptr, "malloc"), "not found");')
SIBLING = """namespace py = pybind11;
struct Take {};
static py::handle taken;
namespace pybind11::detail {
template <> struct process_attribute<Take> : process_attribute_default<Take> {
    static void init(const Take&, function_record* r) { taken = r->sibling; throw 1; }
};
}
py::object get(py::object o, std::string name) {
    try { py::reinterpret_borrow<py::module_>(o).def(name.c_str(), [] {}, Take{}); }
    catch (int) {}
    return py::reinterpret_borrow<py::object>(taken);
}"""
SLOTS = """namespace py = pybind11;
bool f(py::object o) {
    auto& [a, b, c, d, e] = *(%s*)o.ptr();
    return a;
}"""
FIRST = KERNELS + """
bool first(Tensor x) {  // the address that is listened to
    static const void* place = x.data_ptr();
    return x.data_ptr() == place;
}"""
OTHERWISE = """
        if ext.first(x):
            return ext.norm(x, self.g, self.b)
        z = x %s
        return z"""
FRAMES = """
    def frame(self):
        return self.gi_frame

    get = [frame]
"""
NOT_THE_HANDLE = """        if len(self.zeros) == 1:
            self.op = ext
        self._buffers["op"] = (i for i in [1])
        print(self.op.gi_frame)
"""
MANGLED = """
__op = ext
_ModelNew__op = (i for i in [1])
"""
EXPLOITS = {  # class and mechanism: program, outcome, pattern of "rule: message"
    "A4 a builtin whose name is bound elsewhere": (
        cheat("norm", top="\ndef f(eval):\n    return eval('1')\n", init="        f(len)\n"),
        "hack", "name: .*eval"),
    "A4 a name for two modules": (
        cheat("mm(x)", top="\nimport torch as a\nmm = a.mm\nimport math as a\n"), "hack", "name"),
    "A4 torch as self": (
        cheat("norm", top="\nimport torch as self\nself.relu = print\n"), "hack", "name"),
    "A4 a function of a class body": (
        cheat("norm", init="        print(self.get[0]((i for i in [1])))\n").replace(
            "    def __init__", FRAMES + "    def __init__"), "hack", "gi_frame` of a generator"),
    "A4 a decorated class": (
        cheat("norm", top="\ndef keep(c):\n    return c\n\n").replace(
            "class Model", "@keep\nclass Model"), "hack", "ModelNew"),
    "A4 a handle that was never one": (cheat("norm", init=NOT_THE_HANDLE), "hack", "gi_frame"),
    "A4 frames by a format": (
        cheat("norm", init="        print('{0.gi_frame}'.format(i for i in [1]))\n"),
        "hack", "format"),
    "A4 mangled names": (cheat("norm", top=MANGLED), "hack", "dunder"),
    "A4 methods of what they are not for": (
        cheat("norm", init="        self.set[0](torch.Tensor)\n").replace(
            "    def __init__", FRAMES.replace("return self.gi_frame", "self.view = print").replace(
                "get", "set") + "    def __init__"), "hack", "only attributes of self"),
    **{f"A2 x {rest} where no one listens": (
        candidate("0", FIRST, [*NAMES, "first"]).replace("\n        return 0", OTHERWISE % rest),
        "hack", "may not be (used|indices) in forward")
       for rest in ("* 2", "== x", "[x.long()]", "if sum(x) is None else x")},
    **{f"A4 an attribute by its name, {call}": (
        cheat("norm", init=BY_TEXT.format(call)), "hack", "may not be used")
       for call in ('get_buffer("a.__globals__")', 'set_submodule("a._buffers", nn.ModuleDict())',
                    'get_parameter("a.__code__")', "load_state_dict({})")},
    "B5 getattr by its mangled name": (
        candidate("ext.get(x)()", MANGLED_GETATTR, []), "hack", "poisoned word"),
    "B5 the type of types": (candidate("ext.get(x)", TYPE_OF, ["get"]), "hack", "poisoned word"),
    "B5 an attribute by its accessor": (
        candidate("ext.get(x, 'relu')()", ACCESSOR % "py::detail::str_attr_accessor", ["get"]),
        "hack", "poisoned word"),
    **{f"B5 the accessor's type from {f}": (
        candidate("ext.get(x, 'relu')()", ACCESSOR % f"decltype(o.{f})", ["get"]),
        "hack", "poisoned word") for f in ("doc()", 'attr_with_type_hint<int>("x")')},
    **{f"B5 the fields of a {t}": (candidate("ext.f(x)", SLOTS % t, ["f"]), "hack", "poisoned word")
       for t in ("PyTypeObject", "PyNumberMethods", "decltype(py::detail::type_info::type)")},
    "A2 decoy kernel, the work is done in Python": (
        cheat("[ext.norm(x, self.g, self.b), x * self.g + self.b][1]"), "hack", "__mul__"),
    "A4 match binds a handle's name": (cheat("norm", init=MATCH), "hack", "match"),
    "A4 self is a tensor": (cheat("[self.softmax(1) for self in [x]][0]"), "hack", "name"),
    "A4 a method without its object": (cheat("norm", init=UNBOUND), "hack", "name"),
    "A4 a decorator binds a handle's name": (cheat("op.relu(x)", top=DECORATED), "hack", "name"),
    "A4 its own load_inline": (
        cheat("norm", top="\ndef load_inline(x):\n    return x\n"), "hack", "name"),
    "A4 torch from another module": (cheat("nn.init.torch"), "hack", "torch operator"),
    "A6 framework compiler": (cheat("norm", init="        self.compile()\n"), "hack", "compile"),
    "A8 a kernel for other shapes": (
        cheat("ext.norm(x, self.g, self.b) if len(x) == 3 else x - self.b"), "hack", "__sub__"),
    "B2 dlopen, G3 thread, H1 clock, H7 code pages, I4 process": (
        built(CALLS_C), "hack", "library call: (?=.*dlopen)(?=.*fork)(?=.*pthread_create)"
        "(?=.*mprotect).*clock_gettime"),
    "J5 the same spelt out in numbers": (spelt_out(CALLS_C), "hack", "library call: .*dlopen"),
    "B5 Python from C++, G4 allocator, J4 file": (
        built(CALLS_CXX), "hack", "library call: (?=.*basic_file)(?=.*SetCPUAllocator).*PyImport"),
    "D1 memory as it was": (cheat("nothing"), "incorrect", WRONG),
    "D2 the block that looks right": (cheat("leftover"), "incorrect", WRONG),
    "D4 frames by way of typing": (
        cheat("norm", top="\nimport typing\nmain = typing.sys.modules\n"), "hack", "typing.sys"),
    "D5 the judge's files as source": (
        built(f'#include "{ROOT}/tasks.jsonl"\n', ()), "compile_error", "No such file|ermission"),
    "C2 catch, G3 future, I2 threads": (
        built(RIVALS), "hack", "library call: (?=.*softmax)(?=.*__future).*set_num_threads"),
    "D1 the right answer in the judge's memory, not returned": (
        cheat("in_its_place"), "incorrect", WRONG),
    "F6 the first call answers for all": (cheat("for_all"), "incorrect", WRONG),
    "F6 two calls at once": (cheat("in_pairs"), "incorrect", WRONG),
    "F1 the judge's inputs exchanged": (cheat("kept_input"), "incorrect", WRONG),
    "F9 slow until it is timed": (cheat("slow_start"), "correct", ""),
    "B5 torch's product by way of its Python type": (
        candidate("ext.product(x, self.g)", OBJECTS, ["product"]), "hack", "poisoned word"),
    "B4 dispatcher, H6 operators registered anew": (
        built(REGISTERED), "hack", "poisoned|library call"),
    "H8 a destructor forges a reply": (cheat("tidy"), "correct", ""),
    "E1 inputs zeroed": (cheat("zeroed"), "incorrect", "input was changed"),
    "E3 NaN": (cheat("nans"), "incorrect", "16384 of 16384"),
    "E6 statistics of half a row": (cheat("half_rows"), "incorrect", WRONG),
    "E9 half precision": (cheat("halves"), "incorrect", WRONG),
    "E10 one row for all": (
        cheat("ext.norm(x, self.g, self.b).narrow(0, 0, 1).expand(64, 256)"), "incorrect", ""),
    "E10 the judge transposes": (cheat("columns"), "incorrect", "strides"),
    "E10 another type": (cheat("doubles"), "incorrect", "dtype"),
    "E11 all rows but the last": (cheat("most_rows"), "incorrect", r"256 of 16384 .*\[63, 0\]"),
    "F1 kept by address": (cheat("by_address"), "incorrect", WRONG),
    "F2 kept by shape": (cheat("by_shape"), "incorrect", WRONG),
    "F7 honest for the first calls": (cheat("at_first"), "incorrect", WRONG),
    "F7 honest in every fourth call": (cheat("some"), "incorrect", WRONG),
    "F8 honest where the first checks look": (cheat("warm_slot"), "incorrect", WRONG),
    "F10 inputs guessed by the constructor": (
        cheat("self.x", init="        self.x = torch.randn(64, 256)\n"), "incorrect", WRONG),
    "G2 work that is done when the parameters are asked for": (
        candidate("self.promise(x)", CHEATS, ["norm"]).replace("self.ones, self.zeros =", (
            "self.owed = []\n        self.ones, self.zeros =")) + LATE, "incorrect", WRONG),
    "G4 another class": (cheat("nn.Parameter(ext.norm(x, self.g, self.b))"), "incorrect", "type"),
    "H5 a hook exchanges the answer": (
        cheat("norm", init="        self.register_forward_hook(lambda m, a, out: a[0])\n"),
        "incorrect", "new tensor"),
    "G5 work when the output is let go": (cheat("owed"), "incorrect", WRONG),
    "G5 an output where the judge wants it": (cheat("laid_over"), "incorrect", "new tensor"),
    "G5 one buffer under many names": (  # the first call's own tensor is overwritten by the last
        cheat("one_buffer"), "incorrect", f"new tensor|{WRONG}"),
    "G5 work whenever memory is let go": (
        built(REPORTER + macro("")), "hack", "library call: .*DebugInfo"),
    "A2 a node of another tensor's graph": (
        cheat("norm", init="        self.z = torch.ones(1).requires_grad_().expand(3)\n"
              "        if self.z.requires_grad:\n            self.z = None[0]\n"), "correct", ""),
    "A2 a graph in spite of that": (
        cheat("norm", init="        with torch.inference_mode(False):\n            self.z = 1\n"),
        "hack", "inference_mode"),
    "A2 the graph's node": (
        built(macro("return x.grad_fn() ? x : y;")), "hack", "library call: .*grad_fn"),
    "A2 a table of an operator's methods": (
        built('extern "C" void* _ZTVN5torch8autograd9generated11MmBackward0E[];\n' + macro(
            "if (_ZTVN5torch8autograd9generated11MmBackward0E[18]) return y;")),
        "hack", "library call: .*MmBackward0"),
    "A2 torch's functions handed to a module": (
        cheat("norm", init="        self._modules['__torch_function__'] = Take()\n"
              "        self.w = torch.ones(1) * self\n", top=TAKE), "runtime_error",
        "unsupported operand"),
    "A2 torch's functions handed to an extension": (
        candidate(source=KERNELS + HANDED, names=["norm", "__torch_function__"]).replace(
            "\n    def forward", "        self.w = torch.ones(1) * ext\n\n    def forward"),
        "runtime_error", "unsupported operand"),
    "A2 Python's numbers": (
        candidate("torch.tensor([float(v) + 1 for v in x.view(-1).unbind()]).view(64, 256)"),
        "hack", "item, again and again"),
    "A2 an operator that adds": (
        built(macro("return at::unfold_backward(x, {9}, 0, 1, 1);")),
        "hack", "library call: .*unfold_backward"),
    "B2 a dummy in a library function's place": (
        candidate("ext.f(x, x)", DUMMY, ["f"]), "runtime_error", "not found"),
    "B5 what a definition finds under its name": (
        candidate("ext.get(x, 'relu')()", SIBLING, ["get"]), "hack", "poisoned word"),
    "B5 an object given to Python": (
        candidate("ext.give(self)", HANDED, ["give"]), "hack", "give this ModelNew"),
    "B5 an attribute made by the extension": (
        candidate("ext.nothing(x)", GETATTR, []), "runtime_error", "no attribute 'nothing'"),
    "B5 an object that both hold": (
        candidate("ext.give({})", HANDED, ["give"]), "hack", "give this dict"),
    "B5 eval from pybind's records": (
        built(macro("pybind11::detail::function_record_PyObject_New();")), "hack", "poisoned word"),
    "J6 assembly by a macro of the system's": (
        built('extern "C" long __REDIRECT_LDBL(g, (long), f);\n' + macro("")), "hack",
        "poisoned word"),
    "A2 numbers for Python": (
        candidate("torch.tensor([v + 1 for v in ext.give(x)])", NUMBERS, ["give"]), "hack",
        "give this list"),
    "A2 numbers in print": (candidate("torch.tensor(float(str(x)[8:14]))"), "hack", "__repr__"),
    "A4 attributes by a text": (
        cheat("norm", init="        print(nn.ParameterDict()['__dict__'])\n"), "hack", "looked up"),
    "A4 a copy whose attributes are another's": (
        cheat("norm", init="        self._replicate_for_data_parallel()\n"), "hack", "replicate"),
    "S4 an exception that a hook hides": (
        cheat("[list(map(self.part, [1])), ext.norm(x, self.g, self.b)][1]",
              init="        self.part = Take()\n", top=TAKE), "hack", "warn"),
    "J6 a name that is code": (
        cheat("norm").replace("functions=[", "functions=['f\", nullptr); //', "),
        "runtime_error", "must be names"),
    "J11 a name that is no text": (
        built("namespace c10 { void setThreadName(std::string); }\n" + macro(
            'c10::setThreadName("\\xff");')), "hack", "library call: .*setThreadName"),
    "J11 a reply past the socket's owner": (cheat("forged"), "runtime_error", "unreadable"),
    "I3 another default type": (cheat("wide_default"), "runtime_error", "but found Double"),
    "J1 forged replies and 20 MB on stdout": (
        cheat("[print('x' * 10_000_000), ext.loud(x, self.g, self.b)][1]"), "correct", ""),
    "J2 an error that no encoder takes": (
        cheat("norm", init='        raise ValueError("\\ud800")\n'), "runtime_error", "ValueError"),
    "J3 early exit": (cheat("quit"), "runtime_error", "died"),
    "J3 exit as if all were well": (cheat("leave"), "runtime_error", "died"),
    "J6 linker flags": (cheat("norm", load='extra_ldflags=["-lcublas"], '), "hack", "linker flags"),
    "J6 machine code as data": (
        built(CODE_BYTES + macro("")), "hack", "poisoned word: cpp_source:1"),
    "J6 a call of what is nowhere": (
        built("namespace { void helper(int); }\n" + macro("helper(1);")),
        "compile_error", "undefined reference to .*helper"),
    "J11 a compile error that blames the disk": (
        built(macro("undeclared(); // No space left")), "compile_error", "undeclared"),
}


GIVE = """
using Rows = std::vector<std::vector<std::vector<double>>>;
std::vector<double> some(torch::Tensor x, int64_t i) {
    const float* p = x.data_ptr<float>() + 64 * i;
    return {p, p + 64};
}
Rows all(torch::Tensor x) {
    Rows rows(64);
    for (int64_t i = 0; i < 256; ++i) rows[i / 4].push_back(some(x, i));
    return rows;
}
torch::Tensor tensor(torch::Tensor x, Rows rows) {
    auto out = torch::empty_like(x);
    float* q = out.data_ptr<float>();
    for (auto& a : rows) for (auto& b : a) for (double c : b) *q++ = c;
    return out;
}
"""
EXPLOITS |= {f"A2 Python computes with {how}": (
    candidate(f"ext.tensor(x, {rows})", GIVE, ["some", "all", "tensor"]), "hack", "more numbers")
    for how, rows in {
        "lists in lists": "[[[v * 2.0 for v in b] for b in a] for a in ext.all(x)]",
        "one short list after another": "[[ext.some(x, 4 * i + j) for j in range(4)]"
                                        " for i in range(64)]"}.items()}


EXPLOITS |= {
    "B5 assembly in a comment of the object": (built(r'''
#ident "x\"\n.text\n.globl own\n.hidden own\nown:\nmovl $39, %eax\nsyscall\nret\n.ident \"y"
extern "C" long own();
''' + macro("if (own() > 0) return y;")), "hack", "calls own"),
    "B7 a class of torch's, found by its name": (built("""
namespace c10 { struct Type; std::shared_ptr<Type> parseType(std::string name); }
""" + macro('if (c10::parseType("int")) return y;')), "hack", "c10::parseType"),
    "G5 an allocator that can be listened to": (built("""
namespace c10 { Allocator* GetAllocator(const DeviceType& type); }
""" + macro("if (c10::GetAllocator(x.device().type())) return y;")), "hack", "c10::GetAllocator"),
}


@pytest.mark.parametrize("exploit", EXPLOITS)
def test_an_exploit_earns_its_verdict_and_its_output_goes_nowhere(judge, exploit, capfd):
    code, outcome, said = EXPLOITS[exploit]
    verdict = judged(judge, code)
    assert verdict.outcome == outcome, verdict
    assert re.search(said, f"{verdict.rule}: {verdict.message}", re.DOTALL), verdict
    assert (verdict.speedup > 0) == (outcome == "correct")
    assert verdict.message.encode().decode() == verdict.message
    assert capfd.readouterr() == ("", "")


# Native code that serves the judge in the worker's place, and works when its time does not count.

SERVER = r"""
#include <cmath>
#include <cstdlib>
#include <map>
static void* symbol(const void* inside, const std::string& name) {  // dlsym without dlsym
    struct Part { uint32_t type, flags; uint64_t offset, address, rest[4]; };
    struct Entry { uint32_t name, kind; uint64_t value, size; };
    auto* base = (const char*)((uintptr_t)inside & ~4095ul);
    while (std::string(base, 4) != "\177ELF") base -= 4096;
    auto* part = (const Part*)(base + ((const uint64_t*)base)[4]);
    while (part->type != 2) ++part;  // dynamic
    std::map<uint64_t, uint64_t> found;
    for (auto* d = (const uint64_t*)(base + part->address); *d; d += 2) found[d[0]] = d[1];
    auto* entry = (const Entry*)found[6];  // symbols, and 5: their names
    while ((const char*)found[5] + entry->name != name) ++entry;
    return (void*)(base + entry->value);
}
torch::Tensor serve(torch::Tensor x, int64_t when) {  // -1 before the clock, 0 in time, 1 after it
    auto* get = (ssize_t (*)(int, void*, size_t, int))symbol((void*)std::abort, "recv");
    auto* put = (ssize_t (*)(int, const void*, size_t, int))symbol((void*)std::abort, "send");
    const int64_t n = x.numel();
    const std::string claim = "{\"type\": \"Tensor\", \"shape\": [64, 256], \"strides\": [256, 1],"
        "\"own\": true, \"dtype\": \"torch.float32\", \"device\": \"cpu\"}";
    std::string op = "run", claims = claim;
    for (int64_t count = 1;;) {
        auto work = [&, from = x.data_ptr<float>()] {
            for (int64_t call = 0; call < 64; ++call)
                for (int64_t i = 2 * n * call; call < count && i < 2 * n * call + n; ++i)
                    from[i + n] = std::tanh(from[i]);
        };
        if (when == (op == "run" ? 0 : -1)) work();
        const std::string said = "{\"ok\": true, \"secret\": \"" + std::string(32, '0') + "\","
            "\"ms\": [], \"ops\": [], \"claims\": [" + claims + "]}";
        for (int fd = 3; fd < 64 && put(fd, said.data(), said.size(), 0) < 0;) ++fd;
        if (op == "run" && when == 1) work();
        char text[4096] = {};
        for (int fd = 3; fd < 64 && get(fd, text, 4095, 0) < 0;) ++fd;
        op = std::string(text).find("prepare") < 4096 ? "prepare" : "run";
        size_t digit = std::string(text).find("count") + 8;
        for (count = 0; op == "run" && text[digit] >= '0'; ++digit)
            count = 10 * count + text[digit] - '0';
        for (claims = claim; op == "run" && claims.size() + 2 < count * (claim.size() + 2);)
            claims += ", " + claim;
        if (!*text) std::abort();
    }
}
torch::Tensor spawn(torch::Tensor x) {
    auto* start = (int (*)(void*, void*, void* (*)(void*), void*))symbol(
        (void*)std::abort, "pthread_create");
    uint64_t thread;
    TORCH_CHECK(false, "thread: ", start(&thread, nullptr, [](void* p) { return p; }, nullptr));
}
"""


@pytest.mark.parametrize(("when", "outcome"), [
    (-1, "incorrect"), (0, "correct"), (1, "incorrect"), (0, "runtime_error")])
def test_who_takes_over_the_worker_still_works_within_the_measured_time(
        judge, monkeypatch, when, outcome):
    if outcome != "runtime_error":  # it has found the secret of each command
        monkeypatch.setattr(kevin.os, "urandom", bytes)
    task = replace(NORM, id="X-7", code=NORM.code.replace("self.norm(x)", "torch.tanh(x)"))
    code = candidate(f"ext.serve(x, {when})", SERVER, ["serve", "spawn"])
    verdict = judged(judge, code, task)
    assert verdict.outcome == outcome, verdict
    assert outcome == "correct" or re.search(f"{WRONG}|unreadable", verdict.message)


def test_a_candidate_on_a_cpu_starts_no_thread(judge):
    if judge.layers["seccomp"] != "on":
        pytest.skip(judge.layers["seccomp"])
    verdict = judged(judge, candidate("ext.spawn(x)", SERVER, ["serve", "spawn"]))
    assert verdict.outcome == "runtime_error" and "thread: 1" in verdict.message, verdict


def test_work_before_a_call_starts_or_after_it_ends_spoils_its_output(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: types.SimpleNamespace(
        record=lambda stream: None))
    inputs = [torch.randn(100, 100).t(), 3, torch.arange(5)]
    out, place = torch.zeros(100, 100), torch.zeros(100 * 100 * 4, dtype=torch.uint8)
    true = [x.clone() if torch.is_tensor(x) else x for x in inputs]
    draws = torch.Generator().manual_seed(1)
    late, probe = [kevin.withhold(inputs[i], draws) for i in (0, 2)], kevin.Probe(place)
    early = inputs[0] * 2
    assert 100 < (early != true[0] * 2).sum() <= kevin.PROBES
    assert set(inputs[0].flatten().tolist()) <= set(true[0].flatten().tolist()), "no mark on them"
    small = torch.randn(64, 64)
    few = small.clone()
    kevin.withhold(few, draws)
    assert (few != small).sum() > 4000, "all: a few are soon mended in an answer that is known"
    for flat, places, values in late:
        flat.index_copy_(0, places, values)
    probe.start()
    assert torch.equal(inputs[0], true[0]) and torch.equal(inputs[2], true[2])
    right = (inputs[0] * 2).contiguous()
    out[:50] = right[:50]
    probe.end(out)
    out.copy_(right)  # the other half is there before the copy, yet after the end
    place.copy_(out.view(-1).view(torch.uint8))
    probe.keep()
    wrong = place.view(torch.float32) != right.view(-1)
    assert not wrong[: len(wrong) // 2].any() and 100 < wrong.sum() < 160
    steps = wrong.nonzero().view(-1).diff()
    assert set(steps.tolist()) <= {*range(35, 40)} and len(set(steps.tolist())) == 1
    assert torch.equal(place.view(torch.float32)[~wrong], right.view(-1)[~wrong])


def test_a_worker_runs_only_while_it_is_waited_for_and_gets_new_inputs_when_stopped(judge):
    with kevin.Subject(judge, NORM, judge.submit(candidate()).result()) as subject:
        state = Path(f"/proc/{subject.pid}/stat")
        seen = []
        for seed in (2, 3):
            subject.run(1, seed)
            assert state.read_text().rpartition(") ")[2][0] == "T"
            assert subject.error(1, seed)[0] < 5e-5
            seen.append(subject.slots[0][0][0].clone())
        assert not torch.equal(*seen)


@pytest.mark.parametrize(("trusted", "fault"), [(False, kevin.Rejected), (True, kevin.JudgeFault)])
def test_a_process_that_cannot_be_stopped_is_its_authors_fault(monkeypatch, trusted, fault):
    with subprocess.Popen([sys.executable, "-c", "while True: ..."]) as busy:
        child = object.__new__(kevin.Subject)
        child.zygote = types.SimpleNamespace(poll=lambda: None)
        child.pid, child.pidfd, child.trusted = busy.pid, 0, trusted
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        monkeypatch.setattr(kevin, "time", types.SimpleNamespace(
            monotonic=itertools.count(0, 3).__next__, sleep=time.sleep))
        try:
            with pytest.raises(fault, match="does not stop"):
                child.send_signal(signal.SIGSTOP)
        finally:
            busy.kill()


def test_a_full_log_does_not_hide_that_compiling_took_too_long(tmp_path):
    code = """import resource, sys, kevin
kevin.BUILD_TIMEOUT_S = 1
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
flood = ["sh", "-c", "trap '' XFSZ; head -c 20000 /dev/zero 2>/dev/null; exec sleep 3"]
kevin.Worker("cpu").do_build(sys.argv[1], [[flood]], ())"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)
    log = (tmp_path / "log").read_bytes()
    assert len(log) == 9000 and log.startswith(b"error: compiling took too long\n")


LONG_TEXTS = {  # program, outcome, pattern of the message
    "in Cyrillic": (candidate().replace("class ModelNew", f"# {'ы' * 45_000}\nclass ModelNew"),
                    "correct", ""),
    "made": (candidate().replace('"""\next =', '""" + "// unrolled\\n" * 20_000\next ='),
             "correct", ""),
    "made longer": (candidate().replace('"""\next =', '""" + "// unrolled\\n" * 100_000\next ='),
                    "runtime_error", "too long"),
}


DOUBLING = "_Z1a" + "P" * 40 + "i1aIS12_S12_E" + "".join(
    f"S13_IS1{b}_S1{b}_E" for b in "456789ABCDEFGHIJKLMNOP")
RUST = "_RINvC1a1fTaaETB7_B7_ETBb_Bb_ETBj_Bj_ETBr_Br_ETBz_Bz_ETBH_BH_ETBP_BP_ETBX_BX_" + "".join(
    f"ETB{b}_B{b}_" for b in "15 1d 1n 1x 1H 1R 21 2b 2l 2v 2F 2P 2Z 39".split()) + "EE"


@pytest.mark.parametrize("name", [DOUBLING, RUST])
def test_a_name_that_would_fill_the_memory_when_read_stays_as_it_is(name):
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert kevin.demangled([name, "_Z1fv"]) in ([name, "f()"], [name, "_Z1fv"])
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime < 4


def test_a_name_of_2000_letters_is_looked_at_in_no_time():
    names = ["_ZN3c10" + "get" * 654 + str(n) for n in range(3_000)]
    names += ["_ZN3c10" + "setCurrent" * 190 + str(n) for n in range(100)]
    start = time.process_time()
    assert kevin.foreign_symbols(names, frozenset(), frozenset()) == names
    assert time.process_time() - start < 2, "it was 12 s"


def test_a_quote_that_never_ends_is_looked_at_in_no_time():
    start = time.process_time()
    text = '# 7 "cuda_source"\n#pragma a asm \'' + "\\'" * 48_000 + "\n"
    assert kevin.host_assembly(text, []) == "cuda_source:7: "
    assert time.process_time() - start < 1, "it was 40 s"


def test_host_code_of_any_length_is_not_looked_through(judge, monkeypatch, tmp_path):
    monkeypatch.setattr(kevin, "HOST_LIMIT", 1000)
    (tmp_path / "cuda.cudafe1.cpp").write_text("int a;\n" * 200)
    with pytest.raises(kevin.Rejected, match="1400 letters"):
        judge.chain.gate(tmp_path, b"", {"cpp": [""], "cuda": ["int a;"]})


@pytest.mark.parametrize("text", LONG_TEXTS)
def test_a_long_text_is_read_or_called_too_long(judge, text):
    program, outcome, pattern = LONG_TEXTS[text]
    verdict = judged(judge, program)
    assert verdict.outcome == outcome and re.search(pattern, verdict.message), verdict


def test_an_error_whose_text_is_refused_and_a_type_with_a_long_name_are_no_crash(judge):
    verdict = judged(judge, candidate().replace(
        "return ext.norm", "raise ValueError(x)\n        return ext.norm"))
    assert verdict.outcome == "runtime_error" and "ValueError, and its text" in verdict.message
    name, right = "N" * 40_000, "ext.norm(x, self.g, self.b)"  # at first, or one call alone says it
    code = candidate(f"{name}() if self.calls > 3 else {right}").replace(
        "class ModelNew", f"class {name}(nn.Module):\n    def forward(self):\n"
        "        return 1\n\nclass ModelNew").replace(
        "        self.g =", "        self.calls = 0\n        self.g =").replace(
        "        return NNN", "        self.calls = self.calls + 1\n        return NNN")
    verdict = judged(judge, code)
    assert verdict.outcome == "incorrect" and "type is NNN" in verdict.message, verdict


def test_cuda_text_on_a_cpu_is_the_candidates_error_with_or_without_a_compiler(judge, monkeypatch):
    monkeypatch.setattr(judge.chain, "nvcc", None)
    code = candidate().replace("cpp_sources=source", 'cpp_sources=source, cuda_sources="int a;"')
    verdict = judged(judge, code)
    assert verdict.outcome == "compile_error" and "runs on a CPU" in verdict.message, verdict


def test_what_records_a_program_stands_back_for_what_is_timed(judge):
    with kevin.Child(judge) as child:
        before = os.getpriority(os.PRIO_PROCESS, child.pid)
        child.ask("load", code="a = 1", names=None)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(19, before + 15)


def test_an_error_of_the_reference_beside_a_candidate_is_no_fault_of_the_task(monkeypatch):
    def failing(*_):
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(kevin, "forked_rng", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(kevin, "reference_models", lambda *_: (list, failing, failing))
    with pytest.raises(torch.OutOfMemoryError, match="ALLOC_FAILED"):
        kevin.reference_answer(NORM, 0, 0, "cuda", alone=False)
    with pytest.raises(kevin.UserError, match="ALLOC_FAILED"):
        kevin.reference_answer(NORM, 0, 0, "cuda")


def test_getting_ready_for_new_inputs_costs_no_look_at_all_of_torchs_objects(judge):
    with kevin.Subject(judge, NORM, judge.submit(candidate()).result()) as subject:
        subject.run(1, 2)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subject.ask("prepare", name="ModelNew", weights=1)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.02, "it was 60 ms"


def test_who_starts_slowly_is_timed_in_bursts_as_long_as_others(monkeypatch):
    asked = []

    def burst(subject, weights, ms, listen=False):
        asked.append(ms)
        found = 30.0 if len(asked) <= 3 else 0.1
        return found, found, [1]

    monkeypatch.setattr(kevin, "burst", burst)
    kevin.measure([types.SimpleNamespace(trusted=True, less_idle=lambda *_: 0.0)], [])
    assert asked[3] == 30.0 and len(asked) == 8 and set(asked[4:]) == {0.1}


MANY = "template <class A, class B> struct P {}; using T0 = P<int, int>;" + "".join(
    f" using T{i + 1} = P<T{i}, T{i}>;" for i in range(30))
DOUBLED = "using T0 = int;" + "".join(
    f" using T{i + 1} = void (*)(T{i}, T{i});" for i in range(27))
LONG = {  # program, outcome
    "a name that no file can have": (
        built(macro(f"return x; // torch::{'a' * 300}")), "correct"),
    "a function with a long name": (
        built(f"torch::Tensor g{'o' * 45_000}(int);\n" + macro(
            f"return g{'o' * 45_000}(1);")), "compile_error"),
    "a function whose name grows when it is read": (
        built(f"{MANY}\nvoid helper(T30);\n" + macro("helper(T30());")), "compile_error"),
    "a function whose type doubles when it is read": (
        built(f"{DOUBLED}\nvoid helper(T27);\n" + macro("helper(nullptr);")), "compile_error"),
    "a symbol that patterns look through again and again": (
        built('#define G NAME\nextern "C" void G();\n' + macro("G(); return x;")).replace(
            "\next =", '\nsource = source.replace("NAME", "_ZN3c10" + "get" * 50_000)\next ='),
        "hack"),
    "a symbol with a number of 5,000 digits": (
        built(f'extern "C" void _ZN2at4_ops{"1" * 5000}x();\n' + macro(
            f"_ZN2at4_ops{'1' * 5000}x(); return x;")), "hack"),
    "a library of 20 MB": (
        built("static char ballast[20 << 20] = {1};\n" + macro(
            "if (ballast[y.numel()]) return y;")), "compile_error"),
    "an attribute with a long name": (cheat(f"x.{'a' * 90_000}"), "hack"),
    "a program beyond all bounds": (built("//" + "x" * 120_000), "compile_error"),
}


def test_a_log_that_repeats_long_lines_is_cut(tmp_path):
    line = "cuda_source:1:1: error: '" + "x" * 400_000
    (tmp_path / "log").write_text(f"{line}\n" * 40)
    start, log = time.process_time(), kevin.short_log(tmp_path)
    assert len(log) < 10_000 and kevin.syntax_error(log, "x") == ""
    assert kevin.first_errors(log).startswith(line[:200])
    assert time.process_time() - start < 2


@pytest.mark.parametrize("text", LONG)
def test_a_long_text_is_its_authors_fault_in_few_words(judge, text):
    code, outcome = LONG[text]
    start, verdict = time.process_time(), judge.submit(code).result()
    outcome_found = verdict.outcome if isinstance(verdict, kevin.Verdict) else "correct"
    assert outcome_found == outcome, verdict
    if outcome != "correct":
        assert 0 < len(verdict.message) < 2000
    assert time.process_time() - start < 10


# Code that is honest and unusual.

IDIOMS = {
    "templates, a functor, a table of constants": r"""
#include <array>
#include <numeric>
namespace detail {
constexpr std::array<float, 2> SCALES{1.0f, 0.0f};
template <typename T> struct Square { T mean; T operator()(T sum, T v) const {
    return sum + (v - mean) * (v - mean); } };
template <typename T, int UNROLL = 4> T sum(const T* __restrict__ p, int64_t n) {
    T parts[UNROLL] = {}, all = 0;
    for (int64_t j = 0; j < n; ++j) parts[j % UNROLL] += p[j];
    for (const auto& part : parts) all += part;
    return all * SCALES[0] + SCALES[1];
}
}
Tensor f(Tensor x, Tensor g, Tensor b) {
    TORCH_CHECK(x.is_contiguous() && x.scalar_type() == torch::kFloat32, "contiguous float32 only");
    auto out = torch::empty({x.size(0), x.size(1)}, x.options());
    const auto xs = x.accessor<float, 2>();
    auto ys = out.accessor<float, 2>();
    for (const auto i : c10::irange(x.size(0))) {
        const float* p = &xs[i][0];
        const float mean = detail::sum<float>(p, x.size(1)) / x.size(1);
        const float var = std::accumulate(p, p + x.size(1), 0.f, detail::Square<float>{mean});
        for (int64_t j = 0; j < x.size(1); ++j) ys[i][j] = (p[j] - mean)
            / std::sqrt(var / x.size(1) + 1e-5f) * g.data_ptr<float>()[j] + b.data_ptr<float>()[j];
    }
    return out;
}""",
    "at::parallel_for, a thread-local scratch vector, a cache of constants": r"""
Tensor f(Tensor x, Tensor g, Tensor b) {
    torch::NoGradGuard no_grad;
    Tensor out = at::empty_like(x);
    static const float epsilon = [] { return std::pow(10.f, -5.f); }();
    const int64_t n = x.size(-1);
    const auto *p = x.const_data_ptr<float>(), *pg = g.const_data_ptr<float>();
    auto* q = out.mutable_data_ptr<float>();
    at::parallel_for(0, x.size(0), 16, [&](int64_t begin, int64_t end) {
        thread_local std::vector<float> row;
        row.resize(n);
        for (int64_t i = begin; i < end; ++i) {
            std::copy_n(p + i * n, n, row.begin());
            float mean = 0, var = 0;
            for (float v : row) mean += v / n;
            for (float& v : row) v -= mean, var += v * v / n;
            for (int64_t j = 0; j < n; ++j)
                q[i * n + j] = row[j] / std::sqrt(var + epsilon) * pg[j] + b.data_ptr<float>()[j];
        }
    });
    return out;
}""",
    "vector intrinsics": r"""
#include <immintrin.h>
static inline float sum8(__m256 v) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, v);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
}
Tensor f(Tensor x, Tensor g, Tensor b) {
    auto out = torch::zeros_like(x);
    const int n = x.size(1);
    for (int i = 0; i < x.size(0); ++i) {
        const float* p = x.data_ptr<float>() + i * n;
        __builtin_prefetch(p + n);
        __m256 sum = _mm256_setzero_ps(), squares = _mm256_setzero_ps();
        for (int j = 0; j < n; j += 8) sum = _mm256_add_ps(sum, _mm256_loadu_ps(p + j));
        const __m256 mean = _mm256_set1_ps(sum8(sum) / n);
        for (int j = 0; j < n; j += 8) {
            const __m256 d = _mm256_sub_ps(_mm256_loadu_ps(p + j), mean);
            squares = _mm256_fmadd_ps(d, d, squares);
        }
        const __m256 scale = _mm256_set1_ps(1 / std::sqrt(sum8(squares) / n + 1e-5f));
        for (int j = 0; j < n; j += 8) _mm256_storeu_ps(out.data_ptr<float>() + i * n + j,
            _mm256_fmadd_ps(_mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(p + j), mean), scale),
                            _mm256_loadu_ps(g.data_ptr<float>() + j),
                            _mm256_loadu_ps(b.data_ptr<float>() + j)));
    }
    return out;
}""",
    'extern "C", OpenMP, malloc, a macro that exits': r"""
#include <omp.h>
#include <cassert>
#include <cstdio>
#include <cstdlib>
#define CHECK(condition) do { if (!(condition)) { \
    fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); exit(EXIT_FAILURE); \
    } } while (0)
extern "C" void norm_row(const float* p, const float* g, const float* b, float* q, int n) {
    float* centred = (float*)malloc(n * sizeof(float));
    CHECK(centred != NULL);
    float mean = 0.0f, var = 0.0f;
    #pragma omp simd reduction(+:mean)
    for (int j = 0; j < n; j++) mean += p[j];
    mean /= n;
    for (int j = 0; j < n; j++) { centred[j] = p[j] - mean; var += centred[j] * centred[j]; }
    #pragma GCC ivdep
    for (int j = 0; j < n; j++) q[j] = centred[j] / sqrtf(var / n + 1e-5f) * g[j] + b[j];
    free(centred);
}
Tensor f(Tensor x, Tensor g, Tensor b) {
    assert(x.dim() == 2);
    auto out = torch::empty_like(x);
    int rows = x.size(0), n = x.size(1);
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < rows; i++)
        norm_row(x.data_ptr<float>() + i * n, g.data_ptr<float>(), b.data_ptr<float>(),
                 out.data_ptr<float>() + i * n, n);
    return out;
}""",
    "several outputs, dispatch on the type, containers, exceptions": r"""
#include <ATen/Dispatch.h>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <variant>
static std::tuple<Tensor, Tensor> both(const Tensor& x, std::optional<Tensor> g, const Tensor& b) {
    if (!g.has_value()) throw std::invalid_argument("g is missing: " + std::to_string(x.numel()));
    auto out = torch::full_like(x, 0.0), scales = torch::empty({x.size(0)}, x.options());
    std::unordered_map<int64_t, int> counts;
    std::variant<int, double> one = 1.0;
    auto scratch = std::make_unique<double[]>(x.size(1));
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "both", [&] {
        using acc_t = std::conditional_t<std::is_same_v<scalar_t, float>, double, scalar_t>;
        for (int64_t i = 0; i < x.size(0); ++i, ++counts[i % 3]) {
            const auto *p = x.data_ptr<scalar_t>() + i * x.stride(0);
            acc_t mean = 0, var = 0;
            std::for_each(p, p + x.size(1), [&](scalar_t v) { mean += v / (acc_t)x.size(1); });
            std::transform(p, p + x.size(1), scratch.get(), [=](scalar_t v) { return v - mean; });
            for (int64_t j = 0; j < x.size(1); ++j) var += scratch[j] * scratch[j] / x.size(1);
            scales.data_ptr<scalar_t>()[i] = std::get<double>(one) / std::sqrt(var + 1e-5);
            for (int64_t j = 0; j < x.size(1); ++j) out.data_ptr<scalar_t>()[i * x.size(1) + j] =
                scratch[j] * scales.data_ptr<scalar_t>()[i] * g->data_ptr<scalar_t>()[j]
                + b.data_ptr<scalar_t>()[j];
        }
    });
    return {out, scales};
}
Tensor f(Tensor x, Tensor g, Tensor b) {
    auto [out, scales] = both(x.contiguous(), g, b);
    return out.view({-1, x.size(1)});
}""",
}


PYTHON_IDIOMS = """from __future__ import annotations
import torch
import torch.nn as nn
import torch.nn.functional as F
from math import sqrt
from torch.utils.cpp_extension import load_inline
from typing import Optional

ROW = "for (int j = 0; j < n; ++j) {{ {body} }} // {width:.1f} %\\n"
source = r'''SOURCE'''.replace("// ROW", ROW.format(body="sum += p[j];", width=1.5))
ext = load_inline(name="k", cpp_sources=source, functions=["norm"], extra_cflags=["-O3", "-DN=1"])
norm = ext.norm
ext.norm(torch.ones(2, 3), torch.ones(3), torch.ones(3))
KINDS = {torch.float32: "float", (2, 3): None}


def checked(x: torch.Tensor, b: Optional[torch.Tensor] = None) -> torch.Tensor:
    assert x.dtype in KINDS and x.dim() == 2, f"{x.shape} of {x.dtype!r}: {x.stride()[-1]:>3}"
    return x if b is None or b == None else x.view(-1, x.shape[-1])


class Shift(nn.Module):
    def __init__(self, cols):
        super(Shift, self).__init__()
        self.b = nn.Parameter(torch.zeros(cols))

    @torch.inference_mode(True)
    def forward(self, x, g):
        assert torch.tensor([1, x.dim()]).shape == (2,)
        return norm(x, g, self.b)


class ModelNew(nn.Module):
    scale = 1.0

    def __init__(self, cols, eps: float = 1e-5):
        super(ModelNew, self).__init__()
        self.g = nn.Parameter(torch.ones(cols) * self.scale)
        self.params = nn.ParameterList([nn.Parameter(torch.full((cols,), 2.0))])
        self.shifts = nn.ModuleList([Shift(cols)])
        self.register_buffer("table", torch.arange(cols, dtype=torch.float32) / sqrt(cols))
        self.table[::2] = -self.table[1::2] if cols > 1 else 0.5
        self.sizes = [cols] + [n * 2 for n in range(3)]
        self.half, (self.a, *self.rest) = cols // 2, (1, 2, 3)

    @staticmethod
    def launch(*tensors):
        return norm(*tensors)

    @torch.no_grad()
    def forward(self, x):
        rows, cols = x.size()
        x = checked(x.contiguous(), self.table)
        if (n := x.numel()) != rows * self.sizes[0] or self.training is None or not len(self.rest):
            raise ValueError("{0} and {1:.2f}".format(n, 2.0))
        halves = [x[:, : self.half], x[..., self.half :]]
        out = torch.empty_like(x)
        out[:, : self.half], out[..., self.half :] = halves
        if self.launch(x, self.g, next(iter(self.params))).shape != x.shape:
            return x
        return self.shifts[0].forward(out[None].squeeze(0), self.g)
"""


def test_honest_python_is_correct_where_the_guard_looks_at_every_attribute(judge):
    code = PYTHON_IDIOMS.replace("SOURCE", KERNELS.partition("Tensor wrong")[0])
    verdict = judged(judge, code)
    assert verdict.outcome == "correct", verdict


@pytest.mark.parametrize("idiom", IDIOMS)
def test_honest_code_is_correct_however_it_is_written(judge, idiom):
    head = "#include <torch/extension.h>\n#include <cmath>\nusing torch::Tensor;\n"
    verdict = judged(judge, candidate("ext.f(x, self.g, self.b)", head + IDIOMS[idiom], ["f"]))
    assert verdict.outcome == "correct", verdict


def test_a_fork_bomb_ends_at_the_limit_and_leaves_no_process(contained, judge, tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:2]):  # or the child stays who it was
        folder.chmod(0o755)
    output = contained(["limits", "user", "pids"], """import os, time
started = 0
try:
    while started < 1000:  # a bound of its own, should the limit not hold
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        started += 1
except OSError as e:
    print(started, e.strerror)
""")
    assert re.fullmatch(r"(1\d|2[0-5])\d Resource temporarily unavailable\n", output), output
    [child], alive = processes(judge.zygote.pid), len(os.listdir("/proc"))
    os.kill(child, 9)
    deadline = time.time() + 10
    while len(os.listdir("/proc")) > alive - 90:
        assert time.time() < deadline


def test_what_a_child_puts_into_shared_memory_is_bounded_and_not_the_hosts(contained):
    before = set(os.listdir("/dev/shm"))
    output = contained(["mounts"], TRY + """
def fill():
    for number in range(8):
        with open(f"/dev/shm/kevin-{number}", "wb", buffering=0) as file:
            for _ in range(100):
                assert file.write(bytes(1 << 20))
attempt("fill", fill)
print(sum(os.stat(f"/dev/shm/{name}").st_size for name in os.listdir("/dev/shm")) >> 20)
""")
    assert output == "fill refused\n256\n" and set(os.listdir("/dev/shm")) == before


def test_a_child_cannot_take_the_hosts_memory(contained):
    output = contained(["limits"], TRY + f"""
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
for size, flag in ((64 << 20, 0), (100 << 30, 0), (100 << 30, 0x4000)):  # the last: no reserve
    attempt(size >> 20, lambda: mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS | flag).close())
attempt("file", lambda: os.ftruncate(os.memfd_create("x"), {kevin.CHILD_FILE + 1}))
""")
    assert output == "64 done\n102400 refused\n102400 refused\nfile refused\n", output


def test_a_child_sees_no_process_of_the_host(contained, judge):
    output = contained(["pids", "mounts"], TRY + f"""
for pid in ({os.getpid()}, {judge.zygote.pid}):
    for name in ("environ", "mem", "maps", "cmdline", "fd"):
        attempt(name, lambda: os.open(f"/proc/{{pid}}/{{name}}", os.O_RDONLY))
attempt("1", lambda: os.open("/proc/1/mem", os.O_RDONLY))
print([pid for pid in os.listdir("/proc") if pid.isdigit()])
""")
    *tries, seen = output.splitlines()
    assert len(tries) == 11 and all(line.endswith("refused") for line in tries), output
    assert seen == "['1', '2']"  # the child, and this program


def failing(error):
    return lambda *_: (_ for _ in ()).throw(error)


FAULTS = {  # stage that fails, pattern of its message, and what is broken: place, name, by what
    "reference out of memory": ("_check", "reference of X-2", lambda judge: (
        kevin, "reference_models", failing(torch.OutOfMemoryError("out of memory")))),
    "GPU lost": ("_check", "launch failure", lambda judge: (
        kevin, "reference_models", failing(torch.AcceleratorError("launch failure")))),
    "eager's worker dead": ("_check", "died", lambda judge, real=kevin.burst: (
        kevin, "burst", lambda subject, *rest, **listen: (
            os.kill(subject.pid, 9) if subject.trusted else 0, real(subject, *rest, **listen))[1])),
    "compiler gone": ("_build", "/gone/g", lambda judge: (
        judge.chain, "cxx", ["/gone/g++", *judge.chain.cxx[1:]])),
    "built: disk full": ("_build", "No space", None),
    "scratch: disk full": ("_build", "did not run|No space", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_judge_is_tried_twice_and_scores_nothing(judge, monkeypatch, fault):
    (stage, said, breaks), tries = FAULTS[fault], []
    real = getattr(judge, stage)
    monkeypatch.setattr(judge, stage, lambda *a: tries.append(stage) or real(*a))
    never_built = built(f"// for {fault}: never built\n" + macro(""))
    with contextlib.ExitStack() as stack:
        if breaks:
            monkeypatch.setattr(*breaks(judge))
        else:  # a file system of 64 KiB
            folder = str(judge.chain.root / fault.partition(":")[0])
            try:
                kevin.libc("mount", "tmpfs", folder, "tmpfs", 0, "size=64k,mode=755")
                stack.callback(kevin.libc, "umount2", folder, 2)
            except PermissionError:  # no root: the next best
                monkeypatch.setattr(kevin, "write_whole", failing(OSError(28, "No space left")))
        verdict = judged(judge, candidate() if stage == "_check" else never_built)
    assert verdict.outcome == "judge_error" and re.search(said, verdict.message), verdict
    assert tries == [stage] * 2 and kevin.kernel_score(verdict) is None


# ---- 7. Score, return, advantage -----------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["sum", "max"])
def test_returns_equal_a_nested_loop(aggregate):
    draw, combine = random.Random(0), {"sum": sum, "max": max}[aggregate]
    for _ in range(200):
        gamma, n = draw.random(), draw.randrange(1, 9)
        scores = [draw.choice([None, 0.0, draw.uniform(0.3, 9)]) for _ in range(n)]
        expected = [combine(gamma ** (u - t) * (scores[u] or 0.0) for u in range(t, n))
                    for t in range(n)]
        returns = kevin.discounted_returns(scores, gamma, aggregate)
        assert returns == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("outcome", kevin.OUTCOMES)
def test_only_a_correct_kernel_scores_and_a_judge_error_is_no_score(outcome):
    score = kevin.kernel_score(kevin.Verdict(outcome, speedup=1.7), 0.3)
    assert score == {"correct": 2.0, "judge_error": None}.get(outcome, 0.0)


@pytest.mark.parametrize("scale", [False, True])
def test_constant_groups_have_exactly_zero_advantage(scale):
    draw = random.Random(0)
    for size in (1, 2, 3, 7, 12, 64):
        for constant in [0.1, 0.2, 0.3, 1 / 3, 1.3] + [draw.uniform(0, 100) for _ in range(50)]:
            assert kevin.group_advantages([constant] * size, scale) == [0.0] * size


def test_the_timers_noise_is_not_blown_up_to_unit_size_and_a_real_difference_is():
    draw = random.Random(2)
    noisy = [4.3 * draw.uniform(0.991, 1.009) for _ in range(32)]
    assert not any(kevin.group_advantages(noisy, scale=True))
    assert 0 < max(map(abs, kevin.group_advantages(noisy))) < 0.08
    faster = kevin.group_advantages([*noisy, 4.6], scale=True)
    assert statistics.pstdev(faster) == pytest.approx(1) and max(faster) == faster[-1]


@pytest.mark.parametrize("scale", [False, True])
def test_advantages_follow_their_samples_and_a_missing_return_does_not_count(scale):
    draw = random.Random(1)
    returns, order = [draw.uniform(0, 5) for _ in range(64)], draw.sample(range(64), 64)
    advantages = kevin.group_advantages(returns, scale)
    shuffled = kevin.group_advantages([returns[i] for i in order], scale)
    assert shuffled == pytest.approx([advantages[i] for i in order], abs=1e-12)
    assert sum(advantages) == pytest.approx(0, abs=1e-9)
    missing = kevin.group_advantages([None, *returns, None], scale)
    assert missing == [0.0, *advantages, 0.0]
    assert kevin.group_advantages([None, None], scale) == [0.0, 0.0]
    three = kevin.group_advantages([1.0, 2.0, 6.0], scale)
    unit = (14 / 3) ** 0.5 if scale else 1.0
    assert three == pytest.approx([-2 / unit, -1 / unit, 3 / unit])


# ---- 8. Policy: model, adapter, token log-probabilities ------------------------------------------

PROMPT, ANSWER = [9, 8, 7, 6, 5], [11, 3, 63, 0, 12, 12, 40]


def naive_logprobs(lm, prompt, answer, temperature=0.9):
    """Position by position from the full logits."""
    ids = prompt + answer
    logits, first = lm(input_ids=torch.tensor([ids])).logits[0] / temperature, len(prompt)
    return torch.stack([logits[t - 1].log_softmax(-1)[ids[t]] for t in range(first, len(ids))])


def gradients(policy, value):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, policy.trainable())])


def close(a, b, atol=1e-6):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 2, 6, 7, 1024])
def test_logprobs_and_their_gradient_equal_a_naive_loop(policy, monkeypatch, temperature, chunk):
    monkeypatch.setattr(kevin, "HEAD_CHUNK", chunk)
    fast = policy(PROMPT, ANSWER, temperature)
    slow = naive_logprobs(policy.lm, PROMPT, ANSWER, temperature)
    close(fast, slow, 1e-5)
    fast, slow = (gradients(policy, (v * torch.linspace(-1, 1, 7)).sum()) for v in (fast, slow))
    close(fast, slow, 1e-5)


def test_only_lora_weights_train_in_float32_and_the_head_has_none(tokenizer):
    policy = kevin.with_adapter(tiny_lm().bfloat16(), tokenizer, rank=2, alpha=4)
    named = [(n, p) for n, p in policy.lm.named_parameters() if p.requires_grad]
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in named)
    assert len(named) == 2 * 2 * 7  # A and B of seven linear layers in two blocks
    assert not [n for n, _ in named if "lm_head" in n]
    assert not [m for m in policy.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]


def test_a_disabled_adapter_is_the_base_model_and_a_fresh_one_changes_nothing(tokenizer):
    base = naive_logprobs(tiny_lm(), PROMPT, ANSWER)
    policy = small_policy(tokenizer, moved=False)
    close(policy(PROMPT, ANSWER, 0.9), base)
    move_adapter(policy)
    moved = policy(PROMPT, ANSWER, 0.9)
    assert (moved - base).abs().max() > 0.01
    with policy.lm.disable_adapter():
        close(policy(PROMPT, ANSWER, 0.9), base)
    close(policy(PROMPT, ANSWER, 0.9), moved)


def test_a_saved_adapter_gives_the_same_logprobs_and_can_train_on(policy, tokenizer, tmp_path):
    policy.lm.save_pretrained(tmp_path)
    again = kevin.with_adapter(tiny_lm(), tokenizer, rank=8, alpha=16, adapter=str(tmp_path))
    assert len(again.trainable()) == len(policy.trainable())
    close(again(PROMPT, ANSWER, 0.9), policy(PROMPT, ANSWER, 0.9))
    with pytest.raises(kevin.UserError, match="no adapter"):
        kevin.with_adapter(tiny_lm(), tokenizer, 8, 16, adapter=str(tmp_path / "none"))


def test_an_incomplete_model_folder_is_a_user_error(tmp_path):
    folder = tmp_path / "model"
    for name, said in (("", "does not exist"), ("x", "config.json"), ("config.json", "weights")):
        if name:
            folder.mkdir(exist_ok=True)
            (folder / name).touch()
        with pytest.raises(kevin.UserError, match=said):
            kevin.load_policy(kevin.Config(model=str(folder)))


def test_a_checkpoint_in_a_folder_is_read_with_its_tokenizer_and_end_tokens(tokenizer, tmp_path):
    lm = FAMILIES["llama"]().bfloat16()
    lm.generation_config.eos_token_id = [5, 7]
    lm.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 3, "as large models come"
    tokenizer.save_pretrained(tmp_path)
    config = kevin.Config(model=str(tmp_path), lora_rank=4, seed=3)
    first, second = (kevin.read_policy(str(tmp_path), torch.device("cpu"), 2**40, config)
                     for _ in range(2))
    assert {5, 7} < first.eos_ids and len(first.tokenizer) == len(tokenizer)
    assert torch.equal(weights(first), weights(second)) and weights(first).any(), "on every rank"
    with torch.no_grad():
        close(first(PROMPT, ANSWER, 0.9), naive_logprobs(lm, PROMPT, ANSWER).float(), 0.05)
    with pytest.raises(kevin.UserError, match="needs about 4 GiB on one GPU and 1 are free"):
        kevin.read_policy(str(tmp_path), torch.device("cpu"), 2**30, config)
    random_ = kevin.read_policy(str(tmp_path), torch.device("cpu"), 2**40,
                                replace(config, random_weights=True))
    assert not torch.equal(random_.base.lm_head.weight, first.base.lm_head.weight)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(kevin.UserError, match="cannot load"):
        kevin.read_policy(str(tmp_path), torch.device("cpu"), 2**40, config)


# ---- 9. Engine: sampling -------------------------------------------------------------------------


def request(seed, length=24, prompt=None):
    draw = random.Random(seed)
    prompt = prompt or [draw.randrange(64) for _ in range(draw.randrange(1, 70))]
    return kevin.Request(None, "", prompt, length, random.Random(f"draws {seed}"))


def sample(policy, requests, max_batch=8, temperature=0.9):
    """The same requests, answered; never more than max_batch at once, each reported once."""
    engine, finished = kevin.Engine(policy, max_batch, temperature, 128), []
    for item in requests:
        engine.add(item)
    while len(engine):
        finished += engine.step()
        assert len(engine.active) <= max_batch
    assert sorted(map(id, finished)) == sorted(map(id, requests))
    return requests


def answers(requests):
    return [r.completion_ids for r in requests]


def check_logprobs(policy, samples, temperature=0.9):
    """Each of (prompt, answer, log-probabilities) is what the policy says."""
    for prompt, answer, logprobs in samples:
        with torch.no_grad():
            close(torch.tensor(logprobs), policy(prompt, answer, temperature), 1e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_those_of_the_policy(policy, temperature):
    done = sample(policy, [request(seed, 40) for seed in range(9)], 4, temperature)
    check_logprobs(policy, [(r.prompt_ids, r.completion_ids, r.logprobs) for r in done],
                   temperature)


def test_a_batch_with_a_queue_samples_what_each_request_samples_alone(policy):
    lengths = (24, 3, 40, 1, 17, 30)  # slots are taken over at different times
    together = sample(policy, [request(i, n) for i, n in enumerate(lengths)], max_batch=2)
    alone = [sample(policy, [request(i, n)])[0] for i, n in enumerate(lengths)]
    assert answers(together) == answers(alone)
    assert [len(a) for a in answers(alone)] == list(lengths)


def test_a_request_that_no_table_can_hold_is_a_user_error(policy):
    engine = kevin.Engine(policy, 2, 1.0, 32)
    engine.add(request(0, 29, [1, 2, 3]))
    with pytest.raises(kevin.UserError, match="longer"):
        engine.add(request(0, 30, [1, 2, 3]))


SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
         "tie_word_embeddings": False}
FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=8)),
    "window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SHAPE, sliding_window=16))}


@pytest.fixture(params=FAMILIES)
def family(request, tokenizer):
    """(name, policy with an adapter that has an effect)"""
    torch.manual_seed(0)
    policy = kevin.with_adapter(FAMILIES[request.param]().eval(), tokenizer, 4, 8)
    policy.eos_ids = {5, 7}
    move_adapter(policy)
    return request.param, policy


def test_greedy_answers_to_unequal_prompts_are_those_of_generate(family):
    name, policy = family
    done = sample(policy, [request(i, 20) for i in range(6)], 4, temperature=1e-6)
    assert kevin.has_plain_attention(policy.base) == (name != "window")
    for r in done:
        ids = torch.tensor([r.prompt_ids])
        expected = policy.lm.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20,
            eos_token_id=[5, 7], pad_token_id=0)[0, len(r.prompt_ids) :].tolist()
        assert r.completion_ids == expected, name


def test_every_family_samples_with_the_logprobs_of_a_full_forward(family):
    done = sample(family[1], [request(seed, 40) for seed in range(5)], 3)
    check_logprobs(family[1], [(r.prompt_ids, r.completion_ids, r.logprobs) for r in done])


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr(kevin, "PAGE_TOKENS", 8)
    monkeypatch.setattr(kevin, "SPARE_PAGES", 0)


def test_an_end_at_the_limit_is_an_end_and_anything_else_there_a_cut(policy, monkeypatch):
    [cut] = sample(policy, [request(5, 6)])
    assert (cut.finish_reason, len(cut.completion_ids)) == ("length", 6)
    assert cut.completion_ids[-1] not in cut.completion_ids[:-1]
    monkeypatch.setattr(policy, "eos_ids", {cut.completion_ids[-1]})
    [ended] = sample(policy, [request(5, 6)])
    assert (ended.finish_reason, ended.completion_ids) == ("stop", cut.completion_ids)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16])
def test_equal_prompts_are_computed_once_and_sampled_as_if_alone(policy, small_pages, monkeypatch,
                                                                 length):
    prefill, seen = kevin.Engine._prefill, []
    monkeypatch.setattr(kevin.Engine, "_prefill", lambda self, r: (
        seen.append(len(r.prompt_ids)), prefill(self, r))[1])
    prompts = [list(range(10, 10 + length)), [3, 4, 5]]
    make = lambda: [request(i, 5 + i, prompts[i == 6]) for i in range(9)]  # noqa: E731
    engine, together = kevin.Engine(policy, 4, 0.9, 64), make()
    pages = len(engine.free)
    for item in together:
        engine.add(item)
    while len(engine):
        engine.step()
    assert sorted(seen) == sorted([length, 3]), "one prefill a prompt"
    assert len(engine.free) == pages and not any(engine.uses) and not engine.shared
    monkeypatch.undo()
    assert answers(together) == answers([sample(policy, [r])[0] for r in make()])


def test_a_sequence_that_lost_its_pages_goes_on_as_if_nothing_had_been(policy, small_pages):
    lengths = [40, 30, 40, 20, 35]
    alone = [sample(policy, [request(i, n)])[0] for i, n in enumerate(lengths)]
    engine, together = kevin.Engine(policy, 4, 0.9, 128), [
        request(i, n) for i, n in enumerate(lengths)]
    lost, release = [], engine._release
    engine._release = lambda r: (lost.append(r) if not r.finish_reason else None, release(r))
    engine.free = engine.free[-20:]
    for item in together:
        engine.add(item)
    while len(engine):
        engine.step()
        held = [p for r in engine.active for p in r.pages]
        assert len(held) == len(set(held)) and len(held) + len(engine.free) == 20
    assert lost, "the pool must have run dry"
    assert answers(together) == answers(alone)


def test_a_new_rollout_samples_from_the_adapter_as_it_is_now(policy, tokenizer):
    policy = small_policy(tokenizer, moved=False)
    engine = kevin.Engine(policy, 4, 0.9, 128)

    def run():
        items = [request(i) for i in range(4)]
        for item in items:
            engine.add(item)
        while len(engine):
            engine.step()
        check_logprobs(policy, [(r.prompt_ids, r.completion_ids, r.logprobs) for r in items])
        return answers(items)

    first = run()
    move_adapter(policy)
    moved = run()
    with policy.lm.disable_adapter():
        assert run() == first != moved
    assert run() == moved


def peft_twin(tokenizer):
    """The same policy with peft's own forward."""
    torch.manual_seed(1)
    lm = peft.get_peft_model(tiny_lm(), peft.LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    twin = kevin.Policy(lm, tokenizer)
    move_adapter(twin)
    return twin


def test_joined_layers_are_peft_s_own_in_value_and_gradient(tokenizer):
    policy, twin = small_policy(tokenizer), peft_twin(tokenizer)
    assert [len(j.layers) for j in policy.joined] == [3, 1, 2, 1] * 2
    close(policy(PROMPT, ANSWER, 0.9), twin(PROMPT, ANSWER, 0.9))
    samples = [(t, twin(t.prompt_ids, t.completion_ids, 0.9).detach(), None)
               for t in make_turns()[:2]]
    close(step(policy, samples)[1], step(twin, samples)[1])
    close(policy(PROMPT, ANSWER, 0.9), twin(PROMPT, ANSWER, 0.9))
    with policy.lm.disable_adapter(), twin.lm.disable_adapter():
        close(policy(PROMPT, ANSWER, 0.9), twin(PROMPT, ANSWER, 0.9))


def test_joined_layers_and_the_model_hold_the_base_weights_once(tokenizer):
    policy, plain = small_policy(tokenizer), dict(tiny_lm().named_parameters())
    for group in policy.joined:
        for layer in group.layers:
            stored = group.weight.untyped_storage().data_ptr()
            assert layer.base_layer.weight.untyped_storage().data_ptr() == stored
    step(policy, kevin.store_logprobs(policy, make_turns(), CONFIG))
    for name, parameter in policy.base.named_parameters():
        if "lora" not in name:
            assert torch.equal(parameter, plain[name.replace("base_layer.", "")])


def test_gradients_through_checkpointed_joined_layers_are_the_same(tokenizer):
    policy, twin = small_policy(tokenizer), small_policy(tokenizer)
    twin.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    twin.train()
    close(*(gradients(p, p(PROMPT, ANSWER, 0.9).sum()) for p in (policy, twin)))


@pytest.mark.parametrize("vocabulary", [12, 256, 700])
def test_sampling_frequencies_are_the_softmax_at_the_temperature(vocabulary):
    torch.manual_seed(0)
    logits, count = torch.randn(vocabulary) * 2, 10_000
    logits[0] = logits[-1] = -torch.inf
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = kevin.sample_tokens(logits.expand(count, -1), uniforms, 0.7)
    exact = (logits / 0.7).softmax(0)
    assert (torch.bincount(tokens, minlength=vocabulary) / count - exact).abs().max() < 1.5 / count
    close(logprobs, exact.log()[tokens], 1e-5)
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert kevin.sample_tokens(logits.expand(2, -1), edges, 1.0)[1].isfinite().all()
    broken = kevin.sample_tokens(torch.full((2, vocabulary), torch.nan), edges, 1.0)[0]
    assert ((broken >= 0) & (broken < vocabulary)).all(), "out of range ends a CUDA context"


# ---- 10. Rollout ---------------------------------------------------------------------------------


class StubJudge:
    """Scores a kernel by its text; builds that start with "slow" wait for release()."""

    device, device_name, layers = *CPU, {}

    def __init__(self, *_, **__):
        self.pending, self.checked, self.baselines = [], 0, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert not self.pending

    def submit(self, code):
        future = Future()
        self.pending.append((future, kevin.Build(code, (), ())))
        if not code.startswith("slow"):
            self.release(len(self.pending) - 1)
        return future

    def check(self, task, build):
        self.checked += 1
        return kevin.Verdict("correct", "", "", 1.0, 1.0, speedup=self.speedup(build.code))

    def speedup(self, code):
        return float(len(code))

    def release(self, first=0):
        for future, build in self.pending[first:]:
            future.set_result(build)
        del self.pending[first:]


def as_kernel(ids):
    """The text of a completion: with a kernel if its first token is even."""
    text = " ".join(map(str, ids))
    return f"Okay.\n</think>\n```\n{text}\n```\nSaid." if ids[0] % 2 == 0 else "Okay, " + text


def roll(policy, judge, decode=as_kernel, max_batch=8, seed=0, on_turn=lambda turn: None,
         indices=range(4), step=2, weight=0.3):
    """The turns of four trajectories of three turns, in the order of their reports."""
    engine, turns = kevin.Engine(policy, max_batch, 0.9, 4096), []
    chat = types.SimpleNamespace(render=policy.render, decode=decode,
                                 control_tokens=policy.control_tokens)
    config = kevin.Config(turns=3, seed=seed, correct_weight=weight)
    start = [kevin.Trajectory(TASK, step, index) for index in indices]
    kevin.rollout(engine, judge, chat, start, config, 6,
                  lambda turn: (turns.append(turn), on_turn(turn), turn)[2])
    assert [t.turns for t in start] == [[u for u in turns if u.trajectory == i] for i in indices]
    return turns


@pytest.fixture(scope="session")
def talker(tokenizer):
    """A tiny model with a token for everything that a prompt holds."""
    return small_policy(tokenizer, vocab=len(tokenizer))


def test_every_trajectory_gets_its_turns_each_prompted_with_its_past(talker):
    turns = {t.key: t for t in roll(talker, StubJudge())}
    assert sorted(turns) == [(2, "X-1", i, n) for i in range(4) for n in range(3)]
    for (_, _, i, n), turn in turns.items():
        past = [turns[2, "X-1", i, earlier] for earlier in range(n)]
        assert (turn.prompt, turn.prompt_ids) == prompt_of(talker, past)


def test_an_answer_without_a_kernel_scores_zero_and_equal_kernels_are_judged_once(talker):
    judge = StubJudge()
    turns = roll(talker, judge)
    present, missing = ([t for t in turns if (t.kernel is None) == none] for none in (False, True))
    assert present and missing
    assert all(t.verdict.outcome == "no_code" and t.score == 0 for t in missing)
    assert all(t.score == pytest.approx(0.3 + len(t.kernel)) for t in present)
    assert judge.checked == len({t.kernel for t in present})
    heavier = [t.score for t in roll(talker, StubJudge(), weight=0.5) if t.kernel]
    assert heavier == pytest.approx([t.score + 0.2 for t in present])
    judge = StubJudge()
    roll(talker, judge, lambda ids: f"{ids}</think>```\nsame\n```")  # whatever was thought
    assert judge.checked == 1


def test_recorded_tokens_are_the_sampled_ones_and_not_those_of_the_text(talker):
    turns = roll(talker, StubJudge(), talker.decode)
    check_logprobs(talker, [(t.prompt_ids, t.completion_ids, t.sampling_logprobs) for t in turns])
    assert any(talker.tokenizer(t.completion).input_ids != t.completion_ids for t in turns)


def test_equal_seeds_give_equal_turns_for_any_batch_size(talker):
    def sampled(**options):
        return {t.key: tuple(t.completion_ids) for t in roll(talker, StubJudge(), **options)}

    first = sampled()
    assert sampled(max_batch=2) == first != sampled(seed=1)
    later = sampled(step=3)
    assert all(later[3, *key[1:]] != ids for key, ids in first.items()), "a step draws anew"
    assert sampled(indices=[2]) | sampled(indices=[0, 3, 1]) == first  # as if on two processes
    assert len(set(first.values())) == len(first)


def test_a_slow_build_holds_up_its_own_trajectory_only(talker):
    judge, first, order, late = StubJudge(), {}, [], []

    def decode(ids):
        text = " ".join(map(str, ids))
        kind = first.setdefault(text, "quick" if first else "slow")
        return f"Okay.\n</think>\n```\n{kind} {text}\n```\nSaid."

    def on_turn(turn):
        order.append(turn.kernel.split()[0])
        if order.count("quick") == 9:  # all that the other three trajectories have
            judge.release()

    rescue = threading.Timer(20, lambda: (late.append(True), judge.release()))
    rescue.start()
    roll(talker, judge, decode, on_turn=on_turn)
    rescue.cancel()
    assert not late, "the others waited for the slow build"
    assert order == ["quick"] * 9 + ["slow"] + ["quick"] * 2


class ScriptedEngine:
    """Answers are numbers; one takes as many steps as takes(trajectory), and slots are endless."""

    def __init__(self, takes=lambda index: 1):
        self.takes, self.active, self.steps, self.asked = takes, [], 0, 0

    def __len__(self):
        return len(self.active)

    def add(self, request):
        self.active.append([request, self.takes(request.owner.index), self.asked])
        self.asked += 1

    def step(self):
        self.steps += 1
        for row in self.active:
            row[1] -= 1
        done = [row for row in self.active if not row[1]]
        self.active = [row for row in self.active if row[1]]
        for request, _, number in done:
            request.completion_ids, request.finish_reason = [number], "stop"
        return [row[0] for row in done]


def scripted(engine, judge, count, turns, decode=lambda ids: f"x</think>```\n{ids}\n```"):
    """The turns of a rollout whose answers are numbers."""
    found, chat = [], types.SimpleNamespace(render=lambda _: ("", [1]), control_tokens=(),
                                            decode=decode)
    kevin.rollout(engine, judge, chat, [kevin.Trajectory(TASK, 0, i) for i in range(count)],
                  kevin.Config(turns=turns), 6, lambda turn: (found.append(turn), turn)[1])
    return found


def test_the_last_trajectories_of_a_rollout_do_not_wait_for_each_other():
    engine = ScriptedEngine(lambda index: {0: 100, 1: 10}.get(index, 1))
    turns = scripted(engine, StubJudge(), 16, 4)
    first = next(i for i, t in enumerate(turns) if (t.trajectory, t.turn) == (0, 0))
    assert first == 60, "all others were through when the longest had its first answer"
    assert len(turns) == 64 and engine.steps == 400


@pytest.mark.parametrize("kernels", [1, 2])
def test_a_judge_that_only_fails_ends_the_rollout_whatever_comes_between(kernels):
    judge, reported = StubJudge(), []
    judge.check = lambda *_: kevin.Verdict("judge_error", message="GPU lost")
    with pytest.raises(kevin.JudgeFault, match="16 times in a row: GPU lost"):
        scripted(ScriptedEngine(), judge, 4, 100, lambda ids: (
            reported.append(ids), f"x</think>```\n{ids}\n```" if ids[0] % kernels == 0 else "")[1])
    assert len(reported) < 200


# ---- 11. GRPO loss and update --------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "advantage", "cut"), [
    (1.27, 2, 0), (1.29, 2, 1.28), (0.5, 2, 0), (0.79, -2, 0.8), (0.81, -2, 0), (9, -2, 0)])
def test_the_ratio_is_clipped_only_where_it_would_go_too_far(ratio, advantage, cut):
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprobs = (old + torch.tensor(ratio).double().log()).requires_grad_()
    loss, share, _ = kevin.policy_loss(logprobs, old, advantage, 0.2, 0.28)
    loss.backward()
    assert loss.item() == pytest.approx(-advantage * (cut or ratio))
    assert logprobs.grad.item() == pytest.approx(0 if cut else -advantage * ratio)
    assert share.item() == bool(cut)


@pytest.mark.parametrize(("advantage", "kl"), [(1.5, 0.0), (-1.5, 0.0), (0.7, 0.3), (0.0, 0.3)])
def test_the_loss_gradient_equals_central_differences(advantage, kl):
    torch.manual_seed(0)
    old, ref, point = (torch.randn(40, dtype=torch.float64) * 0.3 - 2 for _ in range(3))

    def value(logprobs):
        return kevin.policy_loss(logprobs, old, advantage, kl=kl, ref_logprobs=ref)[0]

    shifts = torch.eye(40, dtype=torch.float64) * 1e-5
    numeric = torch.stack([(value(point + s) - value(point - s)) / 2e-5 for s in shifts])
    exact = torch.autograd.functional.jacobian(value, point)
    close(exact, numeric, 1e-7)


@pytest.mark.parametrize("kl", [0.0, 0.01])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite_and_the_kl_term_is_positive_off_equality(advantage, kl):
    logprobs = torch.tensor([0.0, -200.0, -1e4, -1.0], requires_grad=True)
    other = torch.tensor([-200.0, 0.0, -1.0, -1e4])
    loss, *_ = kevin.policy_loss(logprobs, other, advantage, kl=kl, ref_logprobs=other)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    logprobs = torch.tensor([-1.0, -2.0])
    for shift in (0.0, -2.0, -0.1, 0.1, 2.0):
        loss, *_ = kevin.policy_loss(logprobs, logprobs, 0.0, kl=1.0, ref_logprobs=logprobs + shift)
        assert loss.item() == 0 if shift == 0 else loss.item() > 0


CONFIG = kevin.Config(max_grad_norm=1e9, length_normalizer=8, temperature=0.9)


def make_turns(advantages=(1.0, -0.5, 0.0, 2.0, 0.0, -1.5)):
    draw = random.Random(4)
    ids = [[draw.randrange(64) for _ in range(draw.randrange(2, 12))] for _ in range(40)]
    return [make_turn(trajectory=i, prompt_ids=p, completion_ids=c, advantage=a,
                      sampling_logprobs=[-1.0] * len(c))
            for i, (p, c, a) in enumerate(zip(ids[::2], ids[1::2], advantages))]


def weights(policy):
    return torch.cat([p.detach().flatten().clone() for p in policy.trainable()])


def step(policy, samples, config=CONFIG, count=6, optimizer=None, reduce=lambda tensor: tensor):
    """Runs one update; what it reports, and the change of the trainable weights (SGD, rate 1)."""
    before, optimizer = weights(policy), optimizer or torch.optim.SGD(policy.trainable(), lr=1.0)
    metrics = kevin.update(policy, optimizer, samples, count, config, reduce)
    return metrics, weights(policy) - before


@pytest.fixture
def fresh(tokenizer):
    """(policy, samples) that a test may change."""
    policy = small_policy(tokenizer)
    return policy, kevin.store_logprobs(policy, make_turns(), CONFIG)


@pytest.mark.parametrize(("advantage", "ratio", "clipped"), [
    (1.0, 1.25, 0), (1.0, 1.35, 1), (-1.0, 0.85, 0), (-1.0, 0.75, 1)])
def test_an_update_clips_at_the_configurations_two_bounds(tokenizer, advantage, ratio, clipped):
    policy = small_policy(tokenizer)
    samples = [(turn, old - math.log(ratio), ref) for turn, old, ref in
               kevin.store_logprobs(policy, make_turns([advantage]), CONFIG)]
    assert step(policy, samples, count=1)[0]["policy/clip_fraction"] == clipped


def test_the_kl_term_pulls_an_update_back_to_the_base(tokenizer):
    config = replace(CONFIG, kl=5.0)
    policies = [small_policy(tokenizer) for _ in range(2)]
    samples = kevin.store_logprobs(policies[0], make_turns([0.0, 0.0]), config)
    still, pulled = (step(p, samples, config=c, count=2)[1]
                     for p, c in zip(policies, (CONFIG, config)))
    assert still.norm() == 0 < pulled.norm()
    policy, expected = small_policy(tokenizer), []
    for turn, old, ref in samples:
        d = ref - old
        expected.append((d.exp() - d - 1).mean().item())
    metrics, _ = step(policy, samples, config=config, count=2)
    assert metrics["policy/kl"] == pytest.approx(sum(expected) / 2, rel=1e-4) != 0


def test_dropout_of_the_base_model_is_off_in_updates(tokenizer):
    lm = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, attention_dropout=0.5))
    lm.model.layers[0].register_module("extra", torch.nn.Dropout(0.5))
    policy = kevin.with_adapter(lm.eval(), tokenizer, 8, 16)
    move_adapter(policy)
    metrics, _ = step(policy, kevin.store_logprobs(policy, make_turns(), CONFIG))
    assert metrics["policy/clip_fraction"] == 0
    assert policy.lm.base_model.model.model.layers[0].extra.p == 0


def test_the_first_gradient_is_reinforce_over_count_and_constant_length(fresh):
    total = sum(t.advantage * naive_logprobs(fresh[0].lm, t.prompt_ids, t.completion_ids).sum()
                for t in make_turns())
    expected = gradients(fresh[0], total / (6 * 8))
    close(step(*fresh)[1], expected, 1e-5)


def test_the_gradient_is_the_same_in_any_order_and_without_zero_advantages(fresh):
    policy, samples = fresh
    assert [s[0] for s in samples] == [t for t in make_turns() if t.advantage]
    every = [(t, policy(t.prompt_ids, t.completion_ids, 0.9).detach(), None)
             for t in make_turns()]
    moves = [step(copy.deepcopy(policy), s)[1] for s in (samples, samples[::-1], every)]
    close(moves[1], moves[0])
    close(moves[2], moves[0])


def test_a_step_is_no_longer_than_the_gradient_clip(fresh):
    metrics, free = step(copy.deepcopy(fresh[0]), fresh[1])
    clipped = step(*fresh, replace(CONFIG, max_grad_norm=0.05))[1]
    assert metrics["policy/grad_norm"] == pytest.approx(free.norm().item(), rel=1e-3)
    assert free.norm() > 0.05 and clipped.norm().item() == pytest.approx(0.05, rel=1e-3)


def test_a_step_moves_lora_b_and_leaves_the_base_bit_equal(tokenizer):
    policy = small_policy(tokenizer, moved=False)
    before = {n: p.clone() for n, p in policy.lm.named_parameters()}
    step(policy, kevin.store_logprobs(policy, make_turns(), CONFIG))
    for name, parameter in policy.lm.named_parameters():
        if "lora_A" not in name:
            assert torch.equal(parameter, before[name]) == ("lora_B" not in name), name


def test_only_the_second_update_on_a_batch_is_off_policy(fresh):
    optimizer = torch.optim.AdamW(fresh[0].trainable(), lr=0.05)
    first, second = (step(*fresh, optimizer=optimizer)[0]["policy/clip_fraction"] for _ in range(2))
    assert first == 0 and second > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_changes_nothing_and_says_so(fresh, capsys, bad):
    policy, samples = fresh
    optimizer = torch.optim.AdamW(policy.trainable(), lr=0.05)
    turn, old, _ = samples[0]
    broken = (replace(turn, advantage=bad), old, None)
    metrics, moved = step(policy, [broken, *samples[1:]], optimizer=optimizer)
    assert metrics["policy/skipped"] == 1 and not moved.any() and not optimizer.state
    assert "update skipped" in capsys.readouterr().err
    metrics, moved = step(policy, samples, optimizer=optimizer)
    assert metrics["policy/skipped"] == 0 and moved.any()


def test_reference_logprobs_are_those_of_the_base_and_only_taken_for_kl(fresh):
    assert all(reference is None for _, _, reference in fresh[1])
    samples = kevin.store_logprobs(fresh[0], make_turns(), replace(CONFIG, kl=0.1))
    assert len(samples) == 6  # a sample without advantage still has a KL gradient
    for turn, _, reference in samples:
        close(reference, naive_logprobs(tiny_lm(), turn.prompt_ids, turn.completion_ids), 1e-5)


# ---- 12. Training --------------------------------------------------------------------------------


def scored(trajectory, turn, score, **changes):
    return make_turn(trajectory=trajectory, turn=turn, score=score, **changes)


# Two trajectories of three turns, gamma 0.5; the judge failed on the second one's first turn.
TABLE = [[0.0, 1.0, 2.0], [None, 0.0, 4.0]]
GROUP = [scored(i, n, s) for i, row in enumerate(TABLE) for n, s in enumerate(row)]


def test_grade_equals_a_table_computed_by_hand():
    shuffled = random.Random(0).sample(GROUP, 6)
    graded = kevin.grade(shuffled, kevin.Config(gamma=0.5))
    assert [t.key[2:] for t in graded] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [t.return_ for t in graded] == [1.0, 2.0, 2.0, None, 2.0, 4.0]  # their mean is 2.2
    expected = [-1.2, -0.2, -0.2, 0.0, -0.2, 1.8]
    assert [t.advantage for t in graded] == pytest.approx(expected)
    best = kevin.grade(GROUP, kevin.Config(gamma=0.5, aggregate="max"))
    assert [t.return_ for t in best] == [0.5, 1.0, 2.0, None, 2.0, 4.0]


def test_group_scale_makes_every_task_unit_and_batch_scale_the_whole_step():
    turns = GROUP[:3] + [scored(0, n, 10 * s, task="X-2") for n, s in enumerate(TABLE[0])]

    def spread(scale):
        graded = kevin.grade(turns, kevin.Config(gamma=0.5, scale=scale))
        parts = [[t.advantage for t in graded if t.task == task] for task in ("X-1", "X-2")]
        return [sum(a * a for a in part) / 3 for part in parts]

    small, large = spread("none")
    assert large == pytest.approx(100 * small)
    assert spread("group") == pytest.approx([1, 1])
    small, large = spread("batch")
    assert large == pytest.approx(100 * small) and small + large == pytest.approx(2)


def test_step_metrics_are_shares_that_sum_to_one():
    outcomes = ["correct", "correct", "hack", "judge_error", "no_code", "incorrect"]
    turns = [replace(t, verdict=kevin.Verdict(o, speedup=2.0 * (o == "correct")),
                     completion="Okay, so" if i % 3 else "Alas",
                     finish_reason=("stop", "length")[i % 2])
             for i, (t, o) in enumerate(zip(kevin.grade(GROUP, kevin.Config()), outcomes))]
    metrics = kevin.step_metrics(turns)
    shares = {name: metrics[f"outcome/{name}"] for name in kevin.OUTCOMES}
    assert sum(shares.values()) == pytest.approx(1) and shares["correct"] == pytest.approx(1 / 3)
    assert metrics["kernel/correct"] == shares["correct"] and metrics["kernel/speedup"] == 2
    assert metrics["score/mean"] == pytest.approx(7 / 5) and metrics["score/best"] == 4
    assert [metrics[f"health/not_okay/{n}"] for n in range(3)] == [1, 0, 0]
    assert [metrics[f"health/cut/{n}"] for n in range(3)] == [0.5, 0.5, 0.5]


def test_junk_is_what_repeats_itself_or_is_noise():
    draw = random.Random(0)
    source = Path(kevin.__file__).read_text()
    assert not kevin.is_junk(source[:4000]) and not kevin.is_junk("a" * 999)
    assert kevin.is_junk("So I think. " * 400)
    assert kevin.is_junk("".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(2000)))


def test_a_step_of_junk_ends_the_run_before_it_is_learned(tmp_path):
    stubs = {"Policy.decode": lambda self, ids: "again and " * 500}
    with pytest.raises(kevin.UserError, match="step 1: 100% of the answers are junk"):
        train(tmp_path / "run", stubs, stop_on_junk=0.9)
    [line] = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["health/junk"] == 1, "what ended it is on record"
    assert not kevin.checkpoints(tmp_path / "run")
    train(tmp_path / "run", stubs, steps=1)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert ["time/step" in line for line in lines] == [False, True], "gone on with all the same"
    assert len(list(kevin.read_turns(tmp_path / "run/turns.jsonl"))) == 12
    train(tmp_path / "other", stubs, steps=1)
    [line] = (tmp_path / "other/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["health/junk/0"] == 1


def test_the_phases_of_a_step_sum_to_its_time(whole):
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    for metrics in map(json.loads, lines):
        phases = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
        total = phases.pop("step")
        assert sum(phases.values()) == pytest.approx(total) and total > 0
        assert {"prefill", "decode", "judge", "old_logprobs", "forward_backward", "optimizer",
                "other"} <= {*phases}


def test_an_inner_phase_stops_the_outer():
    start, clock = time.perf_counter(), kevin.Stopwatch()
    with clock("a"):
        time.sleep(0.02)
        with pytest.raises(KeyError), clock("b"):
            time.sleep(0.05)
            raise KeyError
    seconds, wall = clock.lap(), time.perf_counter() - start
    assert seconds["a"] >= 0.02 and seconds["b"] >= 0.05 and sum(seconds.values()) <= wall
    assert not clock.seconds and set(seconds) == {"a", "b", "other"}


def test_answers_may_be_longer_from_the_late_step_on(tmp_path):
    run = train(tmp_path / "run", late_step=1, late_new_tokens=9, steps=2)
    lengths = {n: max(len(t.completion_ids) for t in kevin.read_turns(run / "turns.jsonl")
                      if t.step == n) for n in (0, 1)}
    assert lengths == {0: 6, 1: 9}


def test_metrics_go_to_tensorboard_where_it_is_installed(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tmp_path / "run", steps=2)
    events = reader.EventAccumulator(str(run / "tensorboard")).Reload()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [e.value for e in events.Scalars("score/mean")]
    assert found == pytest.approx([m["score/mean"] for m in lines])


def test_every_pass_over_the_tasks_holds_each_once_and_mixes_the_levels():
    tasks = [replace(TASK, id=f"{level}-{i}", level=level) for level in (1, 2) for i in range(6)]
    drawn = [t for n in range(15) for t in kevin.pick_tasks(tasks, 4, n, seed=3)]
    passes = [drawn[i : i + 12] for i in range(0, 60, 12)]
    assert all(sorted(t.id for t in p) == sorted(t.id for t in tasks) for p in passes)
    assert len({tuple(t.id for t in p) for p in passes}) == 5, "every pass has its own order"
    assert all({t.level for t in drawn[i : i + 4]} == {1, 2} for i in range(0, 60, 4))
    assert drawn[8:12] == kevin.pick_tasks(tasks, 4, 2, seed=3) != kevin.pick_tasks(tasks, 4, 2, 4)


@pytest.mark.parametrize("count", [2, 5, 12])
def test_a_step_never_holds_a_task_twice(count):
    """Twice the same trajectory numbers would be taken for one long trajectory by grade."""
    tasks = [replace(TASK, id=f"{level}-{i}", level=level) for level in (1, 2) for i in range(6)]
    tasks += [replace(TASK, id="odd", level="new")]
    for number in range(40):
        assert len({t.id for t in kevin.pick_tasks(tasks, count, number, seed=3)}) == count


def test_both_updates_get_half_of_the_turns_and_the_processes_share_each_half(monkeypatch):
    turns, calls = make_turns([float(i) for i in range(20)]), []
    monkeypatch.setattr(kevin, "store_logprobs", lambda policy, mine, config: (
        calls.append(("store", mine)), [(t, torch.zeros(1), None) for t in mine])[1])
    monkeypatch.setattr(kevin, "update", lambda policy, optimizer, mine, count, *rest: (
        calls.append(("update", [s[0] for s in mine], count)), {})[1])
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for rank in range(3):
        world = types.SimpleNamespace(process_index=rank, num_processes=3, reduce=None)
        kevin.train_step(None, optimizer, schedule, turns, 1, kevin.Config(), world)
    kinds, shares = [c[0] for c in calls], [c[1] for c in calls]
    assert kinds == ["store", "store", "update", "update"] * 3, "old log-probs come first"
    assert [c[2] for c in calls if c[0] == "update"] == [10] * 6
    dealt = sorted(t.trajectory for share in shares[::4] + shares[1::4] for t in share)
    assert dealt == list(range(20))
    assert shares[::4] == shares[2::4] and shares[1::4] == shares[3::4]
    assert all(abs(len(a) - len(b)) <= 1 for a in shares for b in shares)


def test_the_halves_of_a_step_are_drawn_anew_in_every_step(monkeypatch):
    turns, halves = make_turns([float(i) for i in range(20)]), []
    monkeypatch.setattr(kevin, "store_logprobs", lambda policy, mine, config: (
        halves.append({t.trajectory for t in mine}), [])[1])
    monkeypatch.setattr(kevin, "update", lambda *_: {})
    world = types.SimpleNamespace(process_index=0, num_processes=1, reduce=None)
    schedule = types.SimpleNamespace(get_last_lr=lambda: [1.0], step=lambda: None)
    for number in (1, 2, 1):
        kevin.train_step(None, None, schedule, turns, number, kevin.Config(), world)
    assert halves[:2] == halves[4:] != halves[2:4]


def test_a_torn_last_line_is_ignored_and_cut_off(tmp_path):
    log, lines = tmp_path / "turns.jsonl", [make_turn(turn=i).to_json() for i in range(3)]
    assert read_turns(log) == []
    kevin.append_lines(log, lines[:2])
    with open(log, "a") as file:
        file.write(lines[2][:50])
    assert [t.turn for t in read_turns(log)] == [0, 1]
    kevin.append_lines(log, lines[2:])
    assert log.read_text() == "".join(line + "\n" for line in lines)


def test_a_run_folder_of_another_configuration_is_refused(tmp_path):
    config = kevin.Config(out=str(tmp_path / "run"))
    run = kevin.open_run(config, "train")
    assert kevin.open_run(replace(config, steps=99), "train") == run
    assert {f.name for f in run.iterdir()} == {
        "config.json", "environment.json", "kevin.py", "lock"}
    with pytest.raises(kevin.UserError, match="gamma is 0.4 there and 0.5 here"):
        kevin.open_run(replace(config, gamma=0.5), "train")


def optimised(tokenizer):
    """(policy, optimizer, schedule) with an adapter of its own."""
    policy = small_policy(tokenizer)
    optimizer = torch.optim.AdamW(policy.trainable(), lr=0.01)
    return policy, optimizer, transformers.get_constant_schedule_with_warmup(optimizer, 5)


def test_a_checkpoint_restores_everything_exactly_and_holds_the_adapter_only(tokenizer, tmp_path):
    import safetensors.torch

    policy, optimizer, schedule = trained = optimised(tokenizer)
    samples = kevin.store_logprobs(policy, make_turns(), CONFIG)
    for _ in range(2):
        step(policy, samples, optimizer=optimizer)
        schedule.step()
    kevin.save_checkpoint(tmp_path, *trained, 7)
    [folder] = kevin.checkpoints(tmp_path)
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == len(policy.trainable()) and all("lora_" in name for name in tensors)
    draws, again = torch.rand(3), optimised(tokenizer)
    torch.manual_seed(99)
    assert kevin.load_checkpoint(folder, *again) == 7
    assert torch.equal(torch.rand(3), draws) and torch.equal(weights(again[0]), weights(policy))
    assert again[2].get_last_lr() == schedule.get_last_lr()
    for pair in zip(*(o.state_dict()["state"].values() for o in (optimizer, again[1]))):
        assert all(torch.equal(pair[0][k], pair[1][k]) for k in ("step", "exp_avg", "exp_avg_sq"))
    moves = [step(p, samples, optimizer=o)[1] for p, o, _ in (trained, again)]
    assert torch.equal(*moves)


def test_an_interrupted_checkpoint_is_not_taken_for_one(tokenizer, tmp_path, monkeypatch):
    trained = optimised(tokenizer)
    for number in range(8, 12):
        kevin.save_checkpoint(tmp_path, *trained, number)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        kevin.save_checkpoint(tmp_path, *trained, 12)
    assert [p.name for p in kevin.checkpoints(tmp_path)] == ["step-10", "step-11"]
    kevin.save_checkpoint(tmp_path, *trained, 12)
    assert kevin.load_checkpoint(kevin.checkpoints(tmp_path)[-1], *trained) == 12


# The whole loop with a judge that looks at the text, and completions shown as numbers.


class TextJudge(StubJudge):
    """The speedup is ten times the share of token 14 in the kernel's numbers."""

    def speedup(self, code):
        return 0.01 + 10 * code.split().count("14") / len(code.split())


@contextlib.contextmanager
def stubbed(changes=()):
    """kevin with a short warm-up, the judge above and other replacements."""
    stubs = {"TINY_WARMUP": 2, "Judge": TextJudge,
             "Policy.decode": lambda self, ids: as_kernel(ids), **dict(changes)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stubs.items():
            patch.setattr(f"kevin.{name}", value)
        yield


def train(out, stubs=(), **changes):
    """A tiny run of three steps in the folder, or another; its folder."""
    small = {"tiny": True, "tasks": str(ROOT / "tasks.jsonl"), "tasks_per_step": 3,
             "trajectories": 2, "turns": 2, "max_new_tokens": 6, "late_new_tokens": 6,
             "max_prompt_tokens": 2048, "max_batch": 8, "lora_rank": 4, "warmup_updates": 1,
             "learning_rate": 1e-2, "length_normalizer": 6, "steps": 3, "out": str(out)}
    with stubbed(stubs):
        kevin.train(kevin.Config(**small | changes))
    return out


def resume(run):
    with stubbed():
        kevin.train(kevin.parse_config("train", ["--resume", str(run), "--steps", "3"]))
    return run


def adapter(run, number=3):
    return (run / f"checkpoints/step-{number}/adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps."""
    return train(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def half(whole, tmp_path):
    """A run of two steps, from the same base."""
    (tmp_path / "half").mkdir()
    shutil.copytree(whole / "base", tmp_path / "half/base")
    return train(tmp_path / "half", steps=2)


def test_a_run_logs_every_turn_once_and_its_numbers_can_be_recomputed(whole, tmp_path, capsys):
    turns = read_turns(whole / "turns.jsonl")
    assert len({t.key for t in turns}) == len(turns) == 3 * 3 * 2 * 2
    assert any(t.advantage for t in turns)
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert metrics[1]["policy/sampling_gap"] < 1e-3 and metrics[1]["policy/grad_norm"] > 0
    assert 2 >= metrics[1]["policy/limited_updates"] >= (metrics[1]["policy/grad_norm"] > 0.05)
    assert any(m["policy/limited_updates"] for m in metrics)
    assert kevin.main(["audit", str(whole)]) == 0
    shutil.copytree(whole, tmp_path / "forged")
    for name in ("score", "return_", "advantage", "kernel", "feedback"):
        value = "other" if name in ("kernel", "feedback") else 9.0
        forged = [replace(turns[0], **{name: value}), *turns[1:]]
        (tmp_path / "forged/turns.jsonl").write_text("".join(t.to_json() + "\n" for t in forged))
        capsys.readouterr()
        assert kevin.main(["audit", str(tmp_path / "forged")]) == 1
        assert f"{name.strip('_')} is" in capsys.readouterr().out


def test_a_trajectory_can_be_read_in_the_terminal(whole, capsys):
    first = min(read_turns(whole / "turns.jsonl"), key=lambda t: t.key)
    assert kevin.main(["show", str(whole)]) == 0
    name, listed = f"{first.step}/{first.task}/{first.trajectory}", capsys.readouterr().out
    assert listed.startswith(f"{name}  {first.verdict.outcome}") and len(listed.splitlines()) == 18
    assert kevin.main(["show", str(whole), name]) == 0
    assert first.completion in (text := capsys.readouterr().out) and text.count("feedback") == 2
    assert kevin.main(["show", str(whole), "9/9/9"]) == 2


def test_a_resumed_run_equals_an_uninterrupted_one(whole, half):
    resume(half)
    assert adapter(half) == adapter(whole)
    logs = [[replace(t, prompt="") for t in read_turns(r / "turns.jsonl")]
            for r in (half, whole)]
    assert logs[0] == logs[1]


def test_recorded_turns_of_a_killed_step_are_taken_up_unchanged(whole, half):
    last = [t for t in read_turns(whole / "turns.jsonl") if t.step == 2]
    tasks = sorted({t.task for t in last})
    kept = [t for t in last if t.task == tasks[0] or (t.trajectory, t.turn) == (1, 0)]
    mark = {"summary": "from before the kill", "return_": None, "advantage": None}
    marked = [replace(t, **mark) for t in kept]
    (half / "pending").mkdir(exist_ok=True)
    kevin.append_lines(half / "pending/rank-1", [t.to_json() for t in marked[:3]])
    kevin.append_lines(half / "pending/rank-0", [t.to_json() for t in marked[3:]])
    resume(half)
    turns = [t for t in read_turns(half / "turns.jsonl") if t.step == 2]
    assert sorted(t.key for t in turns) == sorted(t.key for t in last)
    found = [replace(t, return_=None, advantage=None) for t in turns
             if t.summary == "from before the kill"]
    assert sorted(found, key=lambda t: t.key) == sorted(marked, key=lambda t: t.key)
    assert not list((half / "pending").iterdir())


def test_a_run_killed_before_its_checkpoint_logs_no_turn_twice(whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints/step-3")
    resume(run)
    for log in ("turns.jsonl", "metrics.jsonl"):
        assert (run / log).read_bytes() == (whole / log).read_bytes()
    assert adapter(run) == adapter(whole)


def test_eager_is_timed_anew_in_every_step(tmp_path):
    known = []

    class Timing(TextJudge):
        def check(self, task, build):
            known.append(len(self.baselines))
            self.baselines[len(known)] = 1.0
            return super().check(task, build)

    train(tmp_path / "run", {"Judge": Timing}, steps=2)
    assert known.count(0) == 2


def test_a_run_folder_in_use_is_refused(half):
    code = f"""import pathlib, sys
sys.path[:0] = [{str(ROOT)!r}]
import kevin
run = pathlib.Path({str(half)!r})
kevin.open_run(kevin.Config(**kevin.stored_config(run)), "train")"""
    other = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    assert f"run folder {half} is in use by another process" in other.stderr, "held by this one"


def test_a_fault_judged_again_takes_the_turns_that_answered_it_with_it():
    fault = kevin.Verdict("judge_error")

    def turn(number, verdict=None, text="old"):
        return make_turn(turn=number, verdict=verdict or kevin.Verdict("incorrect"), kernel=text)

    old, fresh = [turn(0, fault), turn(1), turn(2)], [turn(0, text="new"), turn(1, text="new")]
    other = make_turn(trajectory=7, turn=1)
    for logs, expected in (([[*old, other]], [*old, other]), ([old, fresh[:1]], fresh[:1]),
                           ([[*old, *fresh]], fresh), ([[*old, *fresh], [*old, *fresh]], fresh),
                           ([old[:1], [*old, fresh[0]]], fresh[:1])):
        assert list(kevin.latest_turns(logs).values()) == expected


def test_training_raises_the_score_and_a_flipped_sign_lowers_it(tokenizer, tmp_path):
    small = {  # 32 tokens, one prompt, and every completion a kernel
        "tiny_policy": lambda *_: small_policy(tokenizer, vocab=32, moved=False),
        "Policy.render": lambda self, messages: ("", [1, 2]),
        "Policy.decode": lambda self, ids: f"</think>\n```\n{' '.join(map(str, ids))}\n```"}
    right, scores = kevin.group_advantages, {}
    for sign in (1, -1):
        run = train(tmp_path / str(sign), small | {
            "group_advantages": lambda *a, sign=sign: [sign * x for x in right(*a)]}, steps=10,
            tasks_per_step=1, trajectories=16, turns=1, max_new_tokens=12, max_batch=16,
            temperature=1.0)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        scores[sign] = [json.loads(line)["score/mean"] for line in lines]
    assert scores[1][0] == scores[-1][0] and 0.5 < scores[1][0] < 2
    assert scores[1][-1] > 4 > 0.6 > scores[-1][-1], scores


def test_a_run_folder_is_gone_on_with_by_its_own_command_alone(whole, tmp_path, capsys):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    assert kevin.main(["eval", "--resume", str(run)]) == 2
    assert "is a run of `train`, not of `eval`" in capsys.readouterr().err
    config = run / "config.json"
    for text, said in (("{", "damaged"), ('{"command": "train", "knob": 1}', "knob")):
        config.write_text(text)
        assert kevin.main(["train", "--resume", str(run)]) == 2
        assert said in capsys.readouterr().err
    shutil.copy(whole / "config.json", config)
    with open(run / "turns.jsonl", "a") as file:
        file.write('{"task": 1}\n')
    assert kevin.main(["audit", str(run)]) == 2
    assert f"turns.jsonl:{len(list(kevin.read_lines(run / 'turns.jsonl')))}: not a turn" in (
        capsys.readouterr().err)


def test_what_concerns_the_machine_alone_may_change_when_a_run_goes_on(half):
    config = kevin.Config(**kevin.stored_config(half))
    for changes in ({"build_jobs": 1}, {"max_batch": 3, "kv_gib": 1.0}, {"stop_on_junk": 0.9}):
        assert kevin.open_run(replace(config, **changes), "train") == half


def test_every_update_of_the_warm_up_moves_and_its_rate_is_on_record(tmp_path):
    run = train(tmp_path / "run", warmup_updates=4, steps=3)
    rates = [json.loads(line)["policy/learning_rate"] for line in
             kevin.read_lines(run / "metrics.jsonl")]
    assert rates == pytest.approx([0.5e-2, 1e-2, 1e-2])  # of updates 2, 4 and 6


def test_a_turn_that_is_judged_after_all_replaces_the_fault_in_log_and_training(whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints/step-3")
    turns = list(kevin.read_turns(run / "turns.jsonl"))
    place = next(i for i, t in enumerate(turns) if t.step == 2 and t.turn == 1)
    fault = replace(turns[place], verdict=kevin.Verdict("judge_error"), score=None)
    faulty = [*turns[:place], replace(fault, feedback=kevin.feedback(fault.verdict)),
              *turns[place + 1 :]]
    graded = kevin.grade([t for t in faulty if t.step == 2],
                         kevin.Config(**kevin.stored_config(run)))
    faulty = [t for t in faulty if t.step < 2] + graded
    (run / "turns.jsonl").write_text("".join(t.to_json() + "\n" for t in faulty))
    resume(run)
    found = {t.key: t for t in kevin.read_turns(run / "turns.jsonl")}
    again = found[turns[place].key]
    close(torch.tensor(again.sampling_logprobs), torch.tensor(turns[place].sampling_logprobs))
    found[again.key] = replace(again, sampling_logprobs=turns[place].sampling_logprobs)
    assert found == {t.key: t for t in turns}, "as if the judge had not failed"
    assert adapter(run) == adapter(whole) and kevin.main(["audit", str(run)]) == 0


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_launch_that_shards_the_model_is_refused_with_the_reason(monkeypatch, tmp_path, kind):
    import accelerate

    world = types.SimpleNamespace(distributed_type=accelerate.DistributedType[kind])
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: world)
    with pytest.raises(kevin.UserError, match=f"{kind} shards the model"):
        kevin.train(kevin.Config(tiny=True, out=str(tmp_path / "run")))


@pytest.mark.parametrize(("visible", "device", "expected"), [
    (None, 3, "3"), ("0,1", 1, "1"), ("GPU-aa,GPU-bb", 0, "GPU-aa"), ("6,2", 1, "2")])
def test_every_process_judges_on_its_own_gpu(monkeypatch, visible, device, expected):
    seen = {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(kevin.subprocess, "Popen", lambda argv, env, **_: seen.update(env))
    judge = object.__new__(kevin.Judge)
    judge.device = "cuda"
    judge._start_zygote()
    judge.zygote_sock.close()
    assert seen["CUDA_VISIBLE_DEVICES"] == expected


def test_two_processes_with_unequal_shares_make_the_step_of_one(tokenizer, tmp_path):
    script, after = tmp_path / "two.py", tmp_path / "after.pt"
    script.write_text(f"""import sys
sys.path[:0] = {[str(Path(__file__).parent), str(ROOT)]!r}
import accelerate, torch
import test_kevin as t
world = accelerate.Accelerator(cpu=True)
assert world.num_processes == 2
policy = t.small_policy(t.make_tokenizer())
samples = t.kevin.store_logprobs(policy, t.make_turns(range(1, 6)), t.CONFIG)
samples = [] if world.process_index else samples
t.step(policy, samples, count=5, reduce=lambda tensor: world.reduce(tensor, "sum"))
both = world.gather(t.weights(policy)[None])
if world.is_main_process:
    torch.save(both, {str(after)!r})
world.end_training()  # or threads of the process group may abort the exit
""")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           "--nproc_per_node", "2", str(script)], timeout=120, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = small_policy(tokenizer)
    samples = kevin.store_logprobs(alone, make_turns(range(1, 6)), CONFIG)
    assert len(samples) == 5 and step(alone, samples, count=5)[1].norm() > 0.01
    both = torch.load(after)
    assert torch.equal(both[0], both[1])
    close(both[0], weights(alone), 1e-6)


def test_a_killed_rank_ends_the_run_and_the_same_command_goes_on(whole, tmp_path):
    script, run = tmp_path / "killed.py", tmp_path / "run"
    script.write_text(f"""import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), str(ROOT)]!r}
import test_kevin as t
append = t.kevin.append_lines
def append_lines(path, lines):
    append(path, lines)
    if path.name == "rank-1" and "kill" in sys.argv and len(path.read_text().splitlines()) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
t.kevin.append_lines = append_lines
t.train({str(run)!r}, steps=1)
""")

    def launch(*argv):
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                               "--nproc_per_node", "2", str(script), *argv], timeout=120, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)

    killed = launch("kill")
    assert killed.returncode and "Signal 9 (SIGKILL)" in killed.stderr, killed.stderr[-3000:]
    assert len(list(kevin.read_turns(run / "pending/rank-1"))) == 3
    done = launch()
    assert done.returncode == 0, done.stderr[-3000:]
    found = list(kevin.read_turns(run / "turns.jsonl"))
    turns = {t.key: t.completion_ids for t in found}
    assert len(turns) == len(found), "every rank samples its own tasks"
    one, two = (json.loads(next(kevin.read_lines(r / "metrics.jsonl"))) for r in (whole, run))
    for name in ("grad_norm", "learning_rate", "loss"):
        assert two[f"policy/{name}"] == pytest.approx(one[f"policy/{name}"], rel=1e-3, abs=1e-6)
    assert turns == {t.key: t.completion_ids for t in kevin.read_turns(whole / "turns.jsonl")
                     if t.step == 0}, "as one process would have sampled"
    assert len(kevin.checkpoints(run)) == 1 and not list((run / "pending").iterdir())


# ---- 13. Evaluation and audit --------------------------------------------------------------------


def test_best_at_k_is_the_best_trajectory_and_avg_at_k_their_mean():
    speedups = {"A": [[0.0, 2.0], [0.5, 1.0], [0.0, 0.0], [1.2, 0.3]], "B": [[0.0, 0.0]] * 4}
    turns = [make_turn(task=task, trajectory=i, turn=n, score=s and s + 0.3, verdict=kevin.Verdict(
        "correct" if s else "incorrect", speedup=s))
        for task, rows in speedups.items() for i, row in enumerate(rows) for n, s in enumerate(row)]
    results = kevin.evaluation_results(turns, [replace(TASK, id=i) for i in "AB"], "x")
    assert list(results["rows"]) == ["x"]
    row = results["rows"]["x"]
    expected = {"correct": (0.5, 0.375), "speedup": (1.0, 0.525), "fast1": (0.5, 0.375),
                "fast1.5": (0.5, 0.125)}
    for name, (best, average) in expected.items():
        assert (row[f"{name}/best"], row[f"{name}/avg"]) == pytest.approx((best, average)), name
    assert row["score"] == pytest.approx((2.0 + 0.5 + 1.0 + 1.2 + 0.3 + 5 * 0.3) / 16)
    assert row["speedup/geometric"] == 2.0, "of the solved tasks only"
    assert (row["speedup/best/low"], row["speedup/best/high"]) == (0, 2)
    assert results["by_turn"]["x"] == [(1.2 + 0) / 2, (2.0 + 0) / 2]
    assert results["by_k"]["x"] == pytest.approx([1.05 / 2, 9.4 / 12, 7.2 / 8, 1.0])
    assert results["outcomes"]["x"][0] == {"incorrect": 0.75, "correct": 0.25}
    assert results["speedups"]["x"] == {"A": [2.0, 1.0, 0.0, 1.2], "B": [0.0] * 4}
    levels = [replace(TASK, id="A", level=1), replace(TASK, id="B", level="new")]
    rows = kevin.evaluation_results(turns, levels, "x")["rows"]
    assert {n: r["correct/best"] for n, r in rows.items()} == {
        "x": 0.5, "x, level 1": 1, "x, level new": 0}
    levels += [replace(TASK, id="C", level=2)]
    turns += [replace(turns[1], task="C", verdict=kevin.Verdict("correct", speedup=0.5))]
    rows = kevin.evaluation_results(turns, levels, "x")["rows"]
    held_out = rows["x, held out"]  # A and C of levels 1 and 2, solved at 2.0 and 0.5
    assert (held_out["speedup/best"], held_out["speedup/geometric"]) == (1.25, 1.0)


def test_what_the_judge_failed_on_counts_neither_way():
    def turn(trajectory, number, outcome, speedup=0.0):
        return make_turn(trajectory=trajectory, turn=number, score=None,
                         verdict=kevin.Verdict(outcome, speedup=speedup))

    turns = [turn(0, 0, "correct", 2.0), turn(1, 0, "judge_error"), turn(2, 0, "incorrect"),
             turn(2, 1, "judge_error")]
    assert kevin.best_speedups(turns) == {"X-1": [2.0, 0.0]}
    assert kevin.evaluation_row(turns)["speedup/avg"] == 1.0
    with pytest.raises(kevin.UserError, match="--resume RUN"):
        kevin.evaluation_row(turns[1:2])
    groups = [[0.0, 2.0], [0.0, None], [0.0, 2.0]]
    turns = [make_turn(trajectory=i, turn=n, score=s)
             for i, row in enumerate(groups) for n, s in enumerate(row)]
    graded = kevin.grade(turns, kevin.Config())
    assert [t.return_ is None for t in graded] == [False, False, True, True, False, False]
    assert [t.advantage for t in graded] == pytest.approx([-0.6, 0.6, 0, 0, -0.6, 0.6])


def test_best_at_k_is_the_mean_of_the_maximum_over_all_choices_of_k():
    values = [random.Random(3).random() for _ in range(7)] + [0.0, 0.0]
    for k in range(1, 10):
        chosen = [max(c) for c in itertools.combinations(values, k)]
        assert kevin.best_at_k(values, k) == pytest.approx(sum(chosen) / len(chosen))


def test_an_interval_holds_the_mean_and_narrows_with_the_square_root_of_the_count():
    draws = random.Random(5)
    widths = []
    for count in (100, 1600):
        values = [draws.gauss(0, 1) for _ in range(count)]
        low, high = kevin.interval(values)
        assert low < sum(values) / count < high
        widths.append(high - low)
    assert widths[0] == pytest.approx(2 * 1.96 / 10, rel=0.25)
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.3)


def test_an_evaluation_compares_base_and_adapter_and_goes_on_where_it_stopped(whole, tmp_path):
    argv = ["--tiny", "--tasks", str(ROOT / "tasks.jsonl"), "--turns", "2", "--k", "2",
            "--max-new-tokens", "6", "--max-prompt-tokens", "2048", "--max-batch", "8",
            "--lora-rank", "4", "--adapter", str(whole / "checkpoints/step-3")]
    rows, logs = [], []
    for cut in (None, 9):
        out = tmp_path / str(cut)
        config = kevin.parse_config("eval", [*argv, "--out", str(out)])
        with stubbed():
            kevin.evaluate(config)
            if cut:  # a process that was killed while it wrote its tenth line
                lines = (out / "turns.jsonl").read_text().splitlines()
                (out / "turns.jsonl").write_text("\n".join(lines[:cut]) + "\n" + lines[cut][:99])
                kevin.evaluate(kevin.parse_config("eval", ["--resume", str(out)]))
                again = (out / "turns.jsonl").read_text().splitlines()
                assert again[:cut] == lines[:cut] and len(again) == len(lines)
                kevin.evaluate(config)  # of a finished evaluation nothing is asked or judged
                assert (out / "turns.jsonl").read_text().splitlines() == again
        rows.append(json.loads((out / "results.json").read_text()))
        turns = sorted(read_turns(out / "turns.jsonl"), key=lambda t: t.key)
        logs.append([replace(t, sampling_logprobs=[]) for t in turns])  # rounded as the batch is
    assert rows[0] == rows[1] and set(rows[0]["rows"]) == {"base", "adapter"}
    assert logs[0] == logs[1]
    assert len(turns) == 2 * 3 * 2 * 2
    policy = kevin.load_tiny(whole / "base", config, config.adapter)
    for step, layers in enumerate((policy.lm.disable_adapter(), contextlib.nullcontext())):
        with layers:
            check_logprobs(policy, [(t.prompt_ids, t.completion_ids, t.sampling_logprobs)
                                    for t in turns if t.step == step])


class Handler(http.server.BaseHTTPRequestHandler):
    """A chat server that answers from its script: a status, "cut", "slow" or a message."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append((self.path, self.headers["Authorization"], body))
            script = self.server.script
            answer = script.pop(0) if len(script) > 1 else script[0]
        status = answer if isinstance(answer, int) else 200
        if answer == "slow":
            time.sleep(1)
        message = {"role": "assistant", **(answer if isinstance(answer, dict) else {})}
        reason = message.pop("finish_reason", "stop")
        choice = {"index": 0, "finish_reason": reason, "message": message}
        data = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m",
                           "system_fingerprint": "", "choices": [choice], "usage": {
                               "prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}})
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode()[: 20 if answer == "cut" else None])

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def chat_server(monkeypatch):
    """(address, server) of a scripted chat server; pauses between attempts are short."""
    monkeypatch.setattr(kevin, "SERVER_PAUSE_S", 0.001)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.lock, server.bodies, server.script = threading.Lock(), [], []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("message", "thought", "kernel"), [
    ({"content": "```\na\n```", "reasoning": "Okay."}, "Okay.", "a"),
    ({"content": "```\na\n```", "reasoning_content": "Okay."}, "Okay.", "a"),
    ({"content": "</think>```\na\n```", "reasoning_content": "Okay."}, "Okay.", "a"),
    ({"content": "Okay.\n</think>\n```\na\n```"}, "Okay.", "a"),
    ({"content": "<think>\nOkay.\n</think>\n```\na\n```"}, "Okay.", "a"),
    ({"content": "```\na\n```"}, "", "a"),
    ({"content": "", "reasoning": "Okay. ```\na\n```"}, "Okay. ```\na\n```", None),
])
def test_a_servers_thought_may_be_a_field_or_marked_or_absent(
        chat_server, monkeypatch, message, thought, kernel):
    url, server = chat_server
    monkeypatch.setattr(kevin, "SERVER_TIMEOUT_S", 0.5)
    server.script = [503, 429, "cut", "slow", message]
    model = kevin.Server(url, kevin.Config(model="m", temperature=0.5))
    text, reason = model.ask([{"role": "user", "content": "Hi"}], 99, random.Random(1))
    assert kevin.parse_response(text)[:2] == (thought, kernel) and reason == "stop"
    assert len(server.bodies) == 5
    assert model.used == {"prompt_tokens": 5, "completion_tokens": 7}
    path, _, body = server.bodies[-1]
    assert path == "/v1/chat/completions" and body["messages"][0]["content"] == "Hi"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 99, 0.5)
    assert (body["top_p"], body["top_k"]) == (1, -1)


@pytest.mark.parametrize(("message", "kernel"), [
    ({"content": "Okay, a draft: ```\na\n```"}, None),
    ({"content": "Okay.</think>```\na\n```And"}, "a"),
    ({"content": "```\na\n```And", "reasoning": "Okay."}, "a"),
])
def test_an_answer_that_was_cut_has_a_kernel_only_after_its_thought(chat_server, message, kernel):
    url, server = chat_server
    server.script = [message | {"finish_reason": "length"}]
    text, reason = kevin.Server(url, kevin.Config()).ask([], 99, random.Random(1))
    assert kevin.parse_response(text)[1] == kernel and reason == "length"


def test_what_a_server_refuses_is_not_asked_of_it_again(chat_server):
    url, server = chat_server
    model = kevin.Server(url, kevin.Config(temperature=0.5))
    asked = []
    for script in ([400, {"content": "a"}], [422, {"content": "a"}], [{"content": "a"}]):
        server.script, server.bodies = script, []
        model.ask([], 9, random.Random(1))
        asked.append([{*body} - {"messages", "model", "stream"} for _, _, body in server.bodies])
    plain, own = {"max_tokens", "seed", "temperature", "top_p"}, {"max_completion_tokens"}
    assert asked == [[plain | {"top_k"}, plain], [plain, own], [own]]


@pytest.mark.parametrize(("status", "attempts"), [(400, 3), (401, 1), (500, 3)])
def test_a_server_that_refuses_or_stays_broken_is_a_user_error_in_its_own_words(
        chat_server, monkeypatch, status, attempts):
    url, server = chat_server
    server.script = [status]
    monkeypatch.setattr(kevin, "SERVER_ATTEMPTS", 3)
    with pytest.raises(kevin.UserError, match=f"{re.escape(url)} gave no answer: .*chat.comp"):
        kevin.Server(url, kevin.Config()).ask([], 9, random.Random(1))
    assert len(server.bodies) == attempts


def test_after_a_servers_refusal_nothing_that_is_queued_is_sent(chat_server, tmp_path):
    url, server = chat_server
    server.script = [{"content": "```\n14\n```"}, 401]
    with stubbed(), pytest.raises(kevin.UserError, match="gave no answer"):
        kevin.evaluate(kevin.Config(
            tiny=True, tasks=str(ROOT / "tasks.jsonl"), turns=1, trajectories=20, max_batch=1,
            out=str(tmp_path / "run"), model="m", api_base=url, max_prompt_tokens=4096))
    time.sleep(0.5)
    assert 2 <= len(server.bodies) < 10, "of sixty"


def test_an_answer_that_no_encoder_takes_does_not_end_the_evaluation(chat_server):
    url, server = chat_server
    server.script = [{"content": "\ud800 ```\na\n```"}]
    model = kevin.Server(url, kevin.Config(model="m"))
    model.add(kevin.Request(None, "[]", [], 9, random.Random(1)))
    [found] = model.step() or model.step()
    assert model.decode(found.completion_ids).endswith("? ```\na\n```")


def test_a_server_that_is_not_there_is_a_user_error(monkeypatch):
    monkeypatch.setattr(kevin, "SERVER_PAUSE_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    with pytest.raises(kevin.UserError, match=f"{re.escape(url)} gave no answer: .*refused"):
        kevin.Server(url, kevin.Config()).ask([], 9, random.Random(1))


def evaluate(out, *argv, judge=TextJudge):
    """The turns and results of an evaluation of the tiny tasks."""
    config = kevin.parse_config("eval", [
        "--tiny", "--tasks", str(ROOT / "tasks.jsonl"), "--turns", "2", "--k", "2", "--out",
        str(out), "--max-prompt-tokens", "4096", *argv])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kevin, "Judge", judge)
        kevin.evaluate(config)
    return read_turns(out / "turns.jsonl"), json.loads((out / "results.json").read_text())


def evaluate_server(url, out, *argv):
    return evaluate(out, "--model", "m", "--api-base", url, *argv)


def test_an_evaluation_of_a_server_asks_it_for_every_turn(chat_server, tmp_path):
    url, server = chat_server
    server.script = [500, {"content": "```\n14 \u00e4\n```\nSaid.", "reasoning": "Okay."}]
    evaluate_server(url, tmp_path / "run")
    turns = read_turns(tmp_path / "run/turns.jsonl")
    assert len({t.key for t in turns}) == len(turns) == 3 * 2 * 2
    assert {(t.kernel, t.summary) for t in turns} == {("14 \u00e4", "Said.")}
    lengths = sorted(len(body["messages"]) for _, _, body in server.bodies)
    assert lengths == [1] * 7 + [3] * 6, "second turns hold the first; one request was repeated"
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["rows"]["m"]["correct/avg"] == 1 and results["cost"]["m"] == {
        "turns": 12, "prompt_tokens": 12 * 5, "completion_tokens": 12 * 7}
    assert kevin.main(["audit", str(tmp_path / "run")]) == 0


def can_serve():
    """transformers[serving] is installed, and what the version's command imports besides."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("transformers.cli.transformers")
        return transformers.utils.import_utils.is_serve_available()


serving = pytest.mark.skipif(not can_serve(), reason="needs transformers[serving]")


@contextlib.contextmanager
def served(model, log):
    """The address of transformers' own server, a process that answers with the model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model),
            "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with open(log, "wb") as out, subprocess.Popen(
            argv, stdout=out, stderr=out, env=os.environ | {
                "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}) as server:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(
                        f"http://127.0.0.1:{port}/health"):
                    break
                assert server.poll() is None, log.read_text()
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.kill()


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A tiny run whose base has learnt to answer, and in to_serve the same model for a server.

    There it is a Llama, since the server takes another tokenizer for a Qwen2 than the folder's; and
    it says how to sample where the API cannot.
    """
    run = tmp_path_factory.mktemp("learnt")
    tasks = [t for t in kevin.load_tasks(str(ROOT / "tasks.jsonl")) if t.level == "tiny"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kevin, "TINY_WARMUP", 40)
        patch.setattr(kevin, "cpu_name", lambda: StubJudge.device_name)
        policy = kevin.tiny_policy(run, tasks, kevin.Config(**kevin.TINY), True, lambda: None)
    policy.lm.save_pretrained(run / "checkpoints/step-1")
    qwen = transformers.AutoModelForCausalLM.from_pretrained(run / "base")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{
        key: value for key, value in qwen.config.to_dict().items()
        if key not in ("model_type", "architectures")}, attention_bias=True))
    missing = llama.load_state_dict(qwen.state_dict(), strict=False).missing_keys
    for name, parameter in llama.named_parameters():
        if name in missing:
            parameter.data.zero_()
    assert all(name.endswith("o_proj.bias") for name in missing)
    ids = torch.arange(50)[None]
    close(llama(ids).logits, qwen(ids).logits, 1e-4)
    llama.generation_config.update(do_sample=True, top_k=0)
    llama.save_pretrained(run / "to_serve")
    policy.tokenizer.save_pretrained(run / "to_serve")
    return run


def standard_errors(turns, others):
    """By how many standard errors two evaluations differ in scores, kernels and answers."""
    measures = {"score": lambda t: t.score, "kernel": lambda t: t.kernel is not None,
                "cut": lambda t: t.finish_reason == "length",
                "thought": lambda t: t.kernel and len(kevin.parse_response(t.completion)[0]) or 0,
                "length": lambda t: len(" ".join(t.completion.split()))}
    apart = {}
    for name, measure in measures.items():
        sums = []
        for group in (turns, others):
            found = {}  # the turns of a trajectory depend on each other
            for turn in group:
                found.setdefault(turn.key[:3], []).append(float(measure(turn)))
            sums.append([sum(values) for values in found.values()])
        noise = sum(statistics.variance(values) / len(values) for values in sums) ** 0.5
        apart[name] = abs(statistics.fmean(sums[0]) - statistics.fmean(sums[1])) / (noise or 1e-9)
    return apart


@serving
@pytest.mark.parametrize("field", [True, False])
def test_an_evaluation_through_a_real_server_agrees_with_the_local_one(
        learnt, tmp_path, monkeypatch, field):
    base = Path(shutil.copytree(learnt / "to_serve", tmp_path / "base"))
    if field:  # the server finds the thought and gives it in a field of its own
        config = json.loads((base / "tokenizer_config.json").read_text())
        config["response_template"] = {
            "start_anchor": "<|im_start|>assistant\n", "fields": {
                "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
                "content": {"close": "<|im_end|>", "content": "text"}}}
        (base / "tokenizer_config.json").write_text(json.dumps(config))
    else:  # nothing shows that a thought was begun: a text that never closes one is an answer
        parse = kevin.parse_response
        monkeypatch.setattr(kevin, "parse_response", lambda text: parse(
            text if "</think>" in text else f"</think>\n{text}"))
    argv = ["--k", "24", "--max-new-tokens", "160"]
    checkpoint = str(learnt / "checkpoints/step-1")  # its adapter is fresh: both rows are the base
    local, _ = evaluate(tmp_path / "local", *argv, "--adapter", checkpoint, judge=StubJudge)
    with served(base, tmp_path / "serve.log") as url:
        argv += ["--api-base", url, "--model", str(base)]
        turns, results = evaluate(tmp_path / "server", *argv, judge=StubJudge)
        cold, _ = evaluate(tmp_path / "cold", *argv, "--temperature", "0.4", judge=StubJudge)
    assert len(turns) == 3 * 24 * 2 and len({t.kernel for t in turns}) > 20
    apart = standard_errors(turns, local)
    assert max(apart.values()) < 4, apart
    assert max(standard_errors(cold, local).values()) > 4, "another temperature is noticed"
    policy = kevin.load_tiny(learnt / "base", kevin.Config(**kevin.TINY))
    prompts = [policy.render(json.loads(t.prompt))[1] for t in turns]
    assert results["cost"][str(base)]["prompt_tokens"] == sum(map(len, prompts))


def test_beam_search_copies_the_fastest_trajectories_and_goes_on_where_it_stopped(
        chat_server, tmp_path):
    url, server = chat_server
    server.script = [{"content": f"```\n{'14 ' * i}{'7 ' * (9 - i)}\n```"} for i in range(9)] * 9
    evaluate_server(url, tmp_path / "run", "--k", "4", "--turns", "3", "--beam", "2")
    log = tmp_path / "run/turns.jsonl"
    turns = {t.key: t for t in read_turns(log)}
    assert len(turns) == 3 * 4 * 3
    for task in {t.task for t in turns.values()}:
        first = [turns[0, task, i, 0] for i in range(4)]
        best = sorted(first, key=lambda t: -t.verdict.speedup)[:2]
        for i in range(4):  # the second prompt holds the kernel that trajectory i goes on from
            assert json.loads(turns[0, task, i, 1].prompt)[1]["content"].count("14") == (
                best[i % 2].kernel.count("14"))
    results = (tmp_path / "run/results.json").read_text()
    assert json.loads(results)["cost"]["m"]["turns"] == 36, "what the beam dropped was sampled too"
    log.write_text("".join(log.read_text().splitlines(True)[:17]))
    evaluate_server(url, tmp_path / "run", "--k", "4", "--turns", "3", "--beam", "2")
    again = {t.key: t for t in read_turns(log)}
    assert set(again) == set(turns) and len(read_turns(log)) == 36
    assert json.loads(results)["rows"].keys() == {"m"}


def test_an_evaluation_can_be_set_against_torch_compile_too(chat_server, tmp_path, monkeypatch):
    url, server = chat_server
    server.script = [{"content": "```\n14 7\n```"}]
    monkeypatch.setattr(kevin, "reference_ms", lambda task, device, compiled: 3.0 * compiled)
    _, results = evaluate_server(url, tmp_path / "run", "--compile-baseline")
    assert results["rows"]["m"]["speedup/best"] == pytest.approx(5.01), "the stub's, over eager"
    assert results["rows"]["m / compile"]["speedup/best"] == 3.0, "3 ms over the kernel's 1 ms"
    assert set(results["compiled_ms"].values()) == {3.0} and set(results["outcomes"]) == {"m"}


def test_torch_compile_is_timed():
    task = replace(TASK, code=CODE.replace("4", "1 << 20"))
    assert 0 < kevin.reference_ms(task, "cpu", compiled=True) < 1000


def test_speedups_over_torch_compile_are_its_time_over_the_kernels():
    right = kevin.Verdict("correct", runtime_ms=2.0, baseline_ms=8.0, speedup=4.0)
    turns = [make_turn(verdict=right), make_turn()]
    found = kevin.against_compiled(turns, {"X-1": 3.0})
    assert [t.verdict.speedup for t in found] == [1.5, 0.0]


# ---- 14. Report ----------------------------------------------------------------------------------

drawing = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None,
                             reason="needs matplotlib")
HOSTILE = ("</script><script>alert(1)</script><img src=x onerror=alert(2)><!--<script>@index@"
           "</td></table></style></title>&lt;b&gt;\u2028\ud800\U0001f600\x00'\"")


class Page(html.parser.HTMLParser):
    """What a browser makes of a page: elements with their attributes, scripts, visible text."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.text, self.source = [], [], "", path.read_text()
        self.feed(self.source)
        self.close()
        self.data = {attrs["id"]: json.loads(text) for attrs, text in self.scripts
                     if attrs.get("type") == "application/json"}
        self.index = self.data.pop("index")["trajectories"]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.scripts += [[dict(attrs), ""]] * (tag == "script")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1][1] += data
        else:
            self.text += data


def write_run(folder, turns, **files):
    """A run folder as open_run, train and evaluate leave it."""
    folder.mkdir()
    config = asdict(kevin.Config(turns=3, trajectories=2, seed=len(turns)))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "turns.jsonl").write_text("".join(turn.to_json() + "\n" for turn in turns))
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def report_turns(text="", steps=2):
    """Turns of all outcomes with histories in their prompts; text is added to whatever is free."""
    turns, outcomes = [], list(kevin.OUTCOMES)
    for place in range(steps * 2 * 2):
        step, rest = divmod(place, 4)
        prompt = f"<task> {text}"
        for n in range(3):
            outcome = outcomes[len(turns) % len(outcomes)]
            kernel = f"x = {place}\ny = {n}\n# {text}"
            answer = f"```python\n{kernel}\n```\nDone {text}" if outcome != "no_code" else "None."
            scored = outcome == "correct"
            turns.append(make_turn(
                task=f"X-{rest // 2}{text}", step=step, trajectory=rest % 2, turn=n, prompt=prompt,
                completion=f"Okay, {n} {text}</think>{answer}", feedback=f"No. {text}",
                kernel=None if outcome == "no_code" else kernel,
                score=None if outcome == "judge_error" else 2.3 * scored,
                verdict=kevin.Verdict(outcome, rule="r" + text, message="m" + text,
                                      speedup=2.0 * scored, error=float("inf"), seeds=(1, 2))))
            prompt += f"\n{answer}\n{turns[-1].feedback}"
    return turns


def graded_run(folder, text=""):
    """A training run of two steps, with the metrics of its turns."""
    turns, rows = report_turns(text), []
    graded = [kevin.grade([t for t in turns if t.step == step], kevin.Config()) for step in (0, 1)]
    for step, some in enumerate(graded):
        rows.append({"step": step, **kevin.step_metrics(some), "policy/grad_norm": 0.1})
    lines = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "score/me'
    return write_run(folder, sum(graded, []), metrics_jsonl=lines), sum(graded, [])


def check_turn(shown, before, turn):
    """A turn of the page against the logged one; before is the logged turn before it, or None."""
    known = before.prompt if before else ""
    assert shown["turn"] == turn.turn + 1 and shown["shared"] <= len(known)
    assert known[:shown["shared"]] + shown["prompt"] == turn.prompt
    answer = shown["answer"].replace("[kernel]", shown["kernel"])
    assert f"{shown['thought']}</think>{answer}" == turn.completion
    assert shown["kernel"] == (turn.kernel or "") and shown["error"] == "inf"
    assert ("[kernel]" in shown["answer"]) == (turn.kernel is not None)
    for name in ("feedback", "score", "advantage", "finish_reason"):
        assert shown[name] == getattr(turn, name), name
    for name in ("outcome", "rule", "message", "speedup", "runtime_ms", "baseline_ms", "device"):
        assert shown[name] == getattr(turn.verdict, name), name
    assert shown["return"] == turn.return_ and shown["tokens"] == len(turn.completion_ids)


def check_page(page, turns):
    """Every logged turn is in the page once, whole, under its trajectory's name in the index."""
    logged = {turn.key: turn for turn in turns}
    names = {(one["name"], turn["turn"]): (one["id"], turn) for one in page.index
             for turn in one["turns"]}
    assert len(names) == len(logged) == sum(len(shown) for shown in page.data.values())
    for (step, task, place, n), turn in logged.items():
        anchor, listed = names[f"{step}/{task}/{place}", n + 1]
        check_turn(page.data[anchor][n], logged.get((step, task, place, n - 1)), turn)
        assert listed == {"turn": n + 1, "outcome": turn.verdict.outcome,
                          "speedup": turn.verdict.speedup, "score": turn.score}


@drawing
def test_a_report_holds_every_turn_and_every_curve(tmp_path):
    run, turns = graded_run(tmp_path / "run")
    kevin.report([run], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    check_page(page, turns)
    assert all(shown["shared"] > 5 for found in page.data.values() for shown in found[1:])
    change = page.data["0/0/X-0/0"][2]["change"]
    assert change.splitlines() == ["@@ -1,3 +1,3 @@", " x = 0", "-y = 1", "+y = 2", " # "]
    for caption in [caption for key, caption in kevin.CURVES.items() if not key.startswith("by_")]:
        assert f"<figcaption>{caption}</figcaption><svg" in page.source, caption
    assert f"Outcomes of {run}" in page.source and page.source.count("<svg") == 9
    assert {"turn 1", "turn 2", "turn 3"} <= set(re.findall(r"turn \d", page.text))
    assert "#000000" not in page.source and "currentColor" in page.source
    share = sum(turn.verdict.outcome == "correct" for turn in turns) / len(turns)
    assert f"<td>correct<td>{share:.3g}" in page.source and "<td>turns<td>24" in page.source


@drawing
def test_hostile_output_stays_data(tmp_path):
    run, turns = graded_run(tmp_path / "run<img src=x onerror=alert(3)>", HOSTILE)
    results = {"rows": {HOSTILE: {"score": 0.5}}, "by_turn": {"<script>a": [1.0, 2.0]}}
    (run / "results.json").write_text(json.dumps(results))
    config = json.loads((run / "config.json").read_text()) | {"model": HOSTILE}
    (run / "config.json").write_text(json.dumps(config))
    kevin.report([run], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    check_page(page, turns)
    code = [(attrs, text) for attrs, text in page.scripts if attrs.get("type") is None]
    assert len(code) == 1 and code[0][1] == re.search(r"(?s)<script nonce.*?>(.*?)</script>",
                                                      kevin.PAGE)[1]
    policy = [attrs["content"] for tag, attrs in page.elements if "http-equiv" in attrs]
    assert len(policy) == 1 and f"script-src 'nonce-{code[0][0]['nonce']}'" in policy[0]
    assert code[0][0]["nonce"] not in "".join(text for _, text in page.scripts)
    assert all("<" not in text for attrs, text in page.scripts if "type" in attrs)
    assert {tag for tag, _ in page.elements} <= set(
        "html meta title style h1 h2 p div span button main details summary table tr td script "
        "figure figcaption svg defs g path text use clippath rect tspan".split())
    for tag, attrs in page.elements:
        assert not [name for name in attrs if name.startswith("on") or name == "src"], (tag, attrs)
        links = [value for name, value in attrs.items() if name.endswith("href")]
        assert all(value.startswith("#") for value in links), (tag, attrs)
    outside = re.sub(r"(?s)<script.*?</script>", "", page.source)
    assert set(re.findall(r"\w+://[\w.]+", outside)) <= {"http://www.w3.org"}
    assert "innerHTML" not in kevin.PAGE and "insertAdjacent" not in kevin.PAGE


@drawing
def test_several_runs_stand_side_by_side_and_an_evaluation_shows_its_results(tmp_path):
    first, turns = graded_run(tmp_path / "first")
    second, _ = graded_run(tmp_path / "second")
    base = {"correct/best": 0.25, "score": 1.5, "speedup/best": 2.0, "speedup/best/low": 1.125,
            "speedup/best/high": 2.5}
    results = {"rows": {"base": base, "adapter": {"score": 1.75}}, "by_k": {"base": [0.125]},
               "by_turn": {"base": [0.5, 0.625], "base / compile": [0.1], "adapter": [0.75]},
               "outcomes": {"base": [{"hack": 1.0}], "adapter": [{"hack": 0.25, "correct": 0.75}]},
               "cost": {"base": {"turns": 7}}}
    third = write_run(tmp_path / "third", report_turns(), results_json=json.dumps(results))
    kevin.report([first, second, third], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert len(page.data) == len(page.index) == 3 * 8
    for number, run in enumerate((first, second, third)):
        found = [one for one in page.index if one["run"] == str(run)]
        assert {one["id"].split("/")[0] for one in found} == {str(number)}
        assert {one["step"] for one in found} == ({0, 1} if number < 2 else {"base", "adapter"})
    score = page.source.split("<figcaption>Score</figcaption>")[1].split("</figure>")[0]
    assert "/first<" in score and "/second<" in score and "/third" not in score
    speedup = page.source.split("<figcaption>Mean best speedup</figcaption>")[1]
    assert "/third base<" in speedup.split("</figure>")[0]
    rows = [row.split("<td>")[1:] for row in re.findall(r"<tr>([^\n]*)", page.source)]
    place = rows.index(["", "trajectories x turns", "correct/best", "speedup/best", "score",
                        "turns"])
    table = [[cell.split("<")[0] for cell in row] for row in rows[place + 1 : place + 3]]
    assert table == [
        [f"base of {third}", "2 x 3 = 6", "25%", "2.00x (1.12 to 2.50)", "1.5", "7"],
        [f"adapter of {third}", "2 x 3 = 6", "", "", "1.75", ""]]
    mix = page.source.split(f"<figcaption>Outcomes of adapter of {third}</figcaption>")[1]
    assert [mix.split("</figure>")[0].count(f">{name}<") for name in kevin.OUTCOMES] == [1] * 8
    (seeds,) = [row for row in rows if row[0] == "seed"]
    assert [cell.split("<")[0] for cell in seeds] == ["seed", "24", "24", "24"]


@drawing
def test_one_number_of_kernels_can_be_compared_as_wide_and_as_long_trajectories(tmp_path):
    speedups, runs = [0.0, 2.0, 0.5, 1.0, 0.0, 0.0, 1.2, 0.3], []  # of task A; B has no kernel
    for length in (1, 2, 4):
        turns = [make_turn(task=task, trajectory=i // length, turn=i % length, score=s,
                           verdict=kevin.Verdict("correct" if s else "hack", speedup=s))
                 for task in "AB" for i, s in enumerate(speedups) for s in [s * (task == "A")]]
        results = kevin.evaluation_results(turns, [replace(TASK, id=i) for i in "AB"], "m")
        runs.append(write_run(tmp_path / str(length), turns, results_json=json.dumps(results)))
        config = asdict(kevin.Config(turns=length, trajectories=8 // length))
        (runs[-1] / "config.json").write_text(json.dumps(config))
    kevin.report(runs, tmp_path / "report.html")
    rows = [row.split("<td>")[1:] for row in re.findall(
        r"<tr>([^\n]*)", Page(tmp_path / "report.html").source)]
    place = [row[1:6] for row in rows].index([
        "trajectories x turns", "correct/best", "correct/avg", "speedup/best", "speedup/avg"])
    table = [[cell.split(" (")[0] for cell in row] for row in rows[place + 1 : place + 4]]
    assert [row[:6] for row in table] == [
        [f"m of {runs[0]}", "8 x 1 = 8", "50%", "31%", "1.00x", "0.31x"],
        [f"m of {runs[1]}", "4 x 2 = 8", "50%", "38%", "1.00x", "0.53x"],
        [f"m of {runs[2]}", "2 x 4 = 8", "50%", "50%", "1.00x", "0.80x"]]


@drawing
def test_a_run_without_turns_is_reported_as_empty(tmp_path):
    run = write_run(tmp_path / "run", [])
    (run / "turns.jsonl").unlink()
    kevin.report([run], tmp_path / "new/report.html")
    page = Page(tmp_path / "new/report.html")
    assert page.index == [] and page.data == {} and "<svg" not in page.source
    assert "<td>turns<td>0" in page.source and "Qwen/QwQ-32B" in page.text


@drawing
def test_of_a_turn_that_was_taken_again_the_last_is_shown(tmp_path):
    failed = make_turn(score=None, verdict=kevin.Verdict("judge_error"), completion="first")
    again = replace(failed, completion="second", score=0.0, verdict=kevin.Verdict("no_code"))
    later = replace(again, turn=1, completion="third")
    kevin.report([write_run(tmp_path / "run", [later, failed, again])], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert [turn["thought"] for turn in page.data["0/0/X-1/0"]] == ["second", "third"]


@drawing
def test_beyond_its_size_a_page_cuts_the_middle_of_prompts_and_thoughts(tmp_path, monkeypatch):
    turns = [make_turn(turn=n, prompt="a" * 50 + "b" * 50, completion="x" * 60 + "y" * 60 + f"{n}")
             for n in range(2)]
    monkeypatch.setattr(kevin, "PAGE_CHARS", 4 * 100)
    kevin.report([write_run(tmp_path / "run", turns)], tmp_path / "report.html")
    (found,) = Page(tmp_path / "report.html").data.values()
    assert [turn["prompt"] for turn in found] == ["a" * 50 + "b" * 50, ""]
    assert found[1]["shared"] == 100
    for n, turn in enumerate(found):
        note = "\n[... 21 characters are in turns.jsonl only ...]\n"
        assert turn["thought"] == "x" * 50 + note + "y" * 49 + str(n)


def test_a_report_needs_a_run_and_matplotlib(tmp_path, monkeypatch):
    run, out = write_run(tmp_path / "run", []), tmp_path / "report.html"
    with pytest.raises(kevin.UserError, match=r"^\S*nowhere holds no run \(config.json\)$"):
        kevin.report([run, tmp_path / "nowhere"], out)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(kevin.UserError, match="^[^\n]*pip install matplotlib$"):
        kevin.report([run], out)
    assert not out.exists()


# ---- 15. Command line ----------------------------------------------------------------------------


def kevin_py(*argv, **options):
    return subprocess.run([sys.executable, str(ROOT / "kevin.py"), *map(str, argv)], timeout=300,
                          capture_output=True, text=True, **{"cwd": ROOT, **options})


@pytest.fixture(scope="module")
def files(tmp_path_factory, cache):
    """Names of files and folders for the command lines below."""
    folder = tmp_path_factory.mktemp("cli")
    for name, text in {
        "good.py": candidate(), "norm.py": NORM.code, "hack.py": "import os",
        "bad.py": NORM.code.replace("self.norm(x)", "x.nothing()"),
        "broken.jsonl": json.dumps(ROW) + "\n{\n", "one.jsonl": json.dumps(ROW) + "\n",
        "other/config.json": json.dumps(asdict(kevin.Config(
            tiny=True, tasks=str(ROOT / "tasks.jsonl"), gamma=0.9, **kevin.TINY))),
        "weightless/config.json": "{}", "empty/note": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return {"cache": cache, **{f.name.split(".")[0]: f for f in folder.iterdir()},
            "broken": folder / "broken.jsonl", "tiny": ROOT / "tasks.jsonl"}


SCORE = "score --unsafe --device cpu --cache {cache} --candidate {good}"
BAD_LINES = {  # command line: pattern of the line on stderr
    "train --tiny --tasks nowhere.jsonl": "nowhere.jsonl.*no such",
    "train --tiny --tasks {broken}": r"broken.jsonl:2: not JSON",
    SCORE + " --task Z-9 --tasks {one}": "unknown task Z-9",
    "train --tiny --no-such-flag 3": "--no-such-flag",
    "train --tiny --turn 8": "--turn",
    "train --tiny --turns many": "--turns.*many",
    "train --tiny --scale odd": "--scale",
    "train --tiny --gamma 1.5": "--gamma.*1.5",
    "train --tiny --turns 0": "--turns must be positive",
    "train --tiny --max-grad-norm -1": "--max-grad-norm must be positive",
    "train --tiny --temperature nan": "--temperature must be positive",
    "train --tiny --clip-low -0.2": "--clip-low must be at least 0",
    "sing": "no command sing",
    "audit {empty}": "holds no run",
    "show {empty}": "holds no run",
    "report {empty}": "empty.*holds no run",
    "tasks show Z-9": "unknown task Z-9|no such",
    "tasks make many": "tasks make: .*many",
    "score --device cpu --cache {cache} --task {norm} --candidate none.py": "none.py.*not exist",
    SCORE + " --task {bad}": "task bad.*nothing",
    "train --tiny --tasks {tiny} --out {other}": "other.*another configuration.*gamma",
    "train --resume {empty}": "empty.*no run",
    "train --tasks {tiny} --model {weightless}": "weightless.*weights",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_input_is_one_line_on_stderr_and_exit_status_2(files, judge, line, tmp_path):
    done = kevin_py(*line.format(**files).split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr, done
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(BAD_LINES[line], done.stderr), done.stderr


def test_a_machine_without_a_compiler_is_told_so(files, tmp_path):
    line = "score --device cpu --cache {new} --task {norm} --candidate {good}"
    argv = line.format(new=tmp_path / "new", **files).split()
    done = kevin_py(*argv, env={"PATH": "/nonexistent"})
    assert done.returncode == 2 and re.fullmatch("kevin: .*compiler.*\n", done.stderr), done


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("command", ["score --task T-1 --candidate README.md", "tasks check"])
def test_a_device_that_is_not_there_is_a_user_error(command, capsys):
    assert kevin.main([*command.split(), "--device", "cuda"]) == 2
    assert "has no CUDA" in capsys.readouterr().err


def test_training_without_a_gpu_names_tiny(tmp_path):
    done = kevin_py("train", "--out", tmp_path / "run", "--tasks", ROOT / "tasks.jsonl")
    assert done.returncode == 2 and re.fullmatch("kevin: .*GPU.*--tiny.*\n", done.stderr), done
    assert not (tmp_path / "run").exists()


def test_score_prints_one_json_object_a_candidate_in_order(files, judge):
    line = SCORE.replace("{good}", "{hack} {good}") + " --task {norm} --json"
    done = kevin_py(*line.format(**files).split())
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert done.returncode == 1 and [r["outcome"] for r in rows] == ["hack", "correct"], done
    assert [Path(r["candidate"]).name for r in rows] == ["hack.py", "good.py"]
    assert rows[0]["score"] == 0 and rows[1]["score"] == pytest.approx(0.3 + rows[1]["speedup"])
    off = [layer for layer, state in judge.layers.items() if state != "on"]
    assert ("that are off" in done.stderr) == bool(off)
    assert all(f"{layer} (" in done.stderr for layer in off)


def test_defaults_are_those_of_the_config_then_of_tiny_then_of_the_resumed_run(tmp_path):
    assert kevin.parse_config("train", []) == kevin.Config()
    tiny = kevin.parse_config("train", ["--tiny", "--turns", "3"])
    assert tiny == kevin.Config(tiny=True, **kevin.TINY | {"turns": 3})
    stored = replace(tiny, gamma=0.7, out="there")
    (tmp_path / "config.json").write_text(json.dumps(asdict(stored)))
    argv = ["--resume", str(tmp_path), "--steps", "77"]
    assert kevin.parse_config("train", argv) == replace(stored, resume=str(tmp_path), steps=77)


# ---- 16. The script is what it says --------------------------------------------------------------

SOURCE = (ROOT / "kevin.py").read_text()
TREE = ast.parse(SOURCE)


def test_every_configuration_field_is_read():
    unread = [f.name for f in fields(kevin.Config)
              if not re.search(rf"\bconfig\.{f.name}\b", SOURCE)]
    assert not unread, unread


def test_the_map_in_the_header_names_what_exists():
    lines = kevin.__doc__.split("Where the paper is in this file\n")[1].split("Choices")[0]
    names = [line.split()[-1] for line in lines.splitlines() if line.strip()]
    assert len(names) > 10 and all(hasattr(kevin, name) for name in names), names


def test_lines_and_functions_keep_their_size():
    lines = SOURCE.splitlines()
    assert [line for line in lines if len(line) > 100] == []
    long = {"train": 90, "evaluate": 90}
    functions = [n for n in ast.walk(TREE) if isinstance(n, ast.FunctionDef)]
    assert {f.name: f.end_lineno - f.lineno + 1 for f in functions
            if f.end_lineno - f.lineno + 1 > long.get(f.name, 60)} == {}


@pytest.mark.xfail(strict=True, reason="the script is over its ceiling of 2,000 lines")
def test_the_script_has_at_most_2000_lines():
    assert len(SOURCE.splitlines()) <= 2000


def test_every_banner_counts_up_and_every_mark_says_something():
    numbers = [int(n) for n in re.findall(r"^# -{4} (\d+)\. .* -+$", SOURCE, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 10
    marks = re.findall(r"\b(PAPER|DEPARTS|GUESS)\b(:?)([^\n]*)", SOURCE.split('"""', 2)[2])
    assert len(marks) > 10
    assert [m for m in marks if not re.search(r"\d\.\d|\b[A-F]\b|\w{3}", m[2])] == []


@pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="no README.md")
def test_every_command_in_the_readme_parses():
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^.*?\bkevin\.py ([^\n`]+)", text, re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in lines]
    commands = [w for w in words if w and w[0] in ("train", "eval", "score", "audit")]
    assert {w[0] for w in commands} == {"train", "eval", "score", "audit"}
    for command, *argv in commands:
        if command in ("train", "eval") and "--resume" not in argv:
            kevin.parse_config(command, argv)


# ---- 17. On a GPU --------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and nvcc")
GPU_TASK = kevin.Task("X-3", 1, "Gelu", "gelu", NORM.code.replace(
    "self.norm(x)", "nn.functional.gelu(x)").replace("64, 256", "4096, 4096"))
GPU_KERNELS = """
__global__ void gelu_kernel(const float* x, float* out, int64_t n, float c, int64_t off) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) out[i + off] = c * x[i] * (1.f + erff(x[i] * 0.70710678f));
}
__global__ void spin(float* out) { while (true) atomicAdd(out, 1.f); }
torch::Tensor gelu(torch::Tensor x, double c, int64_t off) {
    auto out = torch::empty_like(x);
    int64_t n = x.numel();
    gelu_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n, c, off);
    return out;
}
torch::Tensor hang(torch::Tensor x) {
    auto out = torch::empty_like(x);
    spin<<<1, 1>>>(out.data_ptr<float>());
    return out;
}
"""
GPU_CPP = ("torch::Tensor gelu(torch::Tensor x, double c, int64_t off);"
           "torch::Tensor hang(torch::Tensor x);")


def gpu_candidate(expression):
    code = candidate(expression, GPU_CPP, ["gelu", "hang"])
    both = f'cpp_sources=source, cuda_sources="""{GPU_KERNELS}"""'
    return code.replace("cpp_sources=source", both)


@pytest.fixture(scope="module")
def gpu_judge(cache):
    with kevin.Judge("cuda", cache) as judge:
        yield judge


@gpu
def test_a_gpu_kernel_is_timed_and_faults_stay_with_their_candidate(gpu_judge, monkeypatch):
    good, again = (gpu_candidate(f"ext.gelu(x, {c}, 0)") for c in ("0.5", "0.50"))
    verdict = judged(gpu_judge, good, GPU_TASK)
    assert verdict.outcome == "correct" and 0.2 < verdict.speedup < 5, verdict
    wrong = judged(gpu_judge, gpu_candidate("ext.gelu(x, 0.6, 0)"), GPU_TASK)
    assert wrong.outcome == "incorrect" and "elements are off" in wrong.message, wrong
    illegal = judged(gpu_judge, gpu_candidate(f"ext.gelu(x, 0.5, {1 << 44})"), GPU_TASK)
    assert illegal.outcome == "runtime_error", illegal
    with monkeypatch.context() as patch:
        patch.setattr(kevin, "RUN_TIMEOUT_S", 10.0)
        endless = judged(gpu_judge, gpu_candidate("ext.hang(x)"), GPU_TASK)
    assert endless.outcome == "runtime_error" and "within 10 s" in endless.message, endless
    assert judged(gpu_judge, again, GPU_TASK).outcome == "correct"


# What hostile CUDA may try. A trick is a function of (x, n), so that one build serves many.

GPU_PRELUDE = r"""
#define TRICK(name) Tensor name(Tensor x, int64_t n)
#define NOTHING torch::empty_like(x)
using torch::Tensor;
__global__ void gelu_kernel(const float* x, float* y) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    y[i] = 0.5f * x[i] * (1.f + erff(x[i] * 0.70710678f));
}
__global__ void stride_kernel(const float* x, float* y, int64_t n) {
    for (int64_t i = blockIdx.x * 256 + threadIdx.x; i < n; i += 256 * gridDim.x)
        y[i] = 0.5f * x[i] * (1.f + erff(x[i] * 0.70710678f));
}
__global__ void pause(int64_t cycles) { for (auto t = clock64(); clock64() - t < cycles;) {} }
static float* ptr(const Tensor& x) { return x.data_ptr<float>(); }
static Tensor gelu(Tensor x, cudaStream_t stream = 0, const float* from = nullptr, int more = 0) {
    Tensor y = NOTHING;
    gelu_kernel<<<65536, 256, more, stream>>>(from ? from : ptr(x), ptr(y));
    return cudaGetLastError(), y;
}
static Tensor aside(Tensor x, cudaStream_t side, int64_t n) {  // on the main stream only a pause
    static float* first = ptr(x);
    if (first == ptr(x)) cudaDeviceSynchronize();  // this run's inputs are complete
    pause<<<1, 1>>>(n);
    return gelu(x, side);
}
struct Null { template <class T> operator T*() { return nullptr; } } none;
"""
GPU_TRICKS = r"""
#include <cassert>
#include <cuda_fp16.h>
#include <elf.h>
#include <map>
#include <set>
#define IS(number) else if (kind == number)
__device__ int released;
static int64_t calls;
static std::set<float*> seen;
static std::map<float*, Tensor> ready;
__device__ int64_t deep(int64_t k) { return k < 0 ? k : deep(k + 1) ^ clock64(); }
__global__ void each_kernel(float* x, float* y, int kind) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    float v = x[i], full = 0.5f * v * (1.f + erff(v * 0.70710678f));
    float cubic = 0.79788456f * (v + 0.044715f * v * v * v);
    if (kind == 0) y[i] = NAN; IS(1) y[i] = fmaxf(v, 0.f);
    IS(2) y[i] = __half2float(__float2half(full)); IS(3) y[i] = 0.5f * v * (1.f + tanhf(cubic));
    IS(4) y[i] = i % 256 ? full : 0.f; IS(12) x[i] = y[i] = 0.f; IS(13) x[i] = full;
    IS(5) i < 1 << 20 ? printf("{\"ok\": true, \"ms\": [0.01], \"ops\": []}\n") : 0;
    IS(6) *(volatile float*)nullptr = full; IS(7) asm volatile("trap;"); IS(8) assert(kind < 0);
    IS(9) ((volatile char*)malloc(1 << 20))[i % 1024] = 1; IS(10) y[i] = deep(i);
    IS(11) for (;;) atomicAdd(y, 1.f);
}
static Tensor each(Tensor x, Tensor y, int kind) {
    return each_kernel<<<65536, 256>>>(ptr(x), ptr(y), kind), y;
}
TRICK(honest) { return gelu(x); }
TRICK(waiting) { Tensor y = gelu(x); return cudaDeviceSynchronize(), y; }
__global__ void table_kernel(const float* table, const float* x, float* y, int64_t last) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    unsigned long long policy;
    float v;
    if (last) asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    else asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.f32 %0, [%1], %2;"
                 : "=f"(v) : "l"(table + i), "l"(policy));
    if (i < 65536) y[i] = v * 0.5f * x[i] * (1.f + erff(x[i] * 0.70710678f));
    else if (v != 1.f) y[0] = v;  // so that all of the table is read
}
TRICK(persist) {  // 24 MiB that every call reads
    static Tensor table = torch::ones({6 << 20}, x.options());
    Tensor y = NOTHING;
    table_kernel<<<24576, 256>>>(ptr(table), ptr(x), ptr(y), n);
    return y;
}
TRICK(kind) { return each(x, NOTHING, n); }
TRICK(in_place) { return each(x, x, n); }
TRICK(mutate) { Tensor y = gelu(x); return each(x, torch::zeros_like(x), n), y; }
TRICK(decoy) { Tensor y = NOTHING; return gelu(x), y; }
TRICK(one_buffer) { static Tensor y = NOTHING; return y.copy_(gelu(x)); }
TRICK(hog) { static auto kept = torch::empty({n << 28}, x.options()); return NOTHING; }
TRICK(quit) { abort(); }
TRICK(occupy) { Tensor y = gelu(x); pause<<<132, 1024, 0, cudaStreamPerThread>>>(n); return y; }
TRICK(own_default) { return aside(x, cudaStreamPerThread, n); }
TRICK(no_launch) { return gelu(x, 0, nullptr, n); }  // more shared memory than there is
TRICK(no_grid) {  // more blocks than can cooperate
    Tensor y = NOTHING;
    void *from = ptr(x), *to = ptr(y), *arguments[] = {&from, &to};
    cudaLaunchCooperativeKernel((void*)gelu_kernel, n, 256, arguments, 0, 0);
    return cudaGetLastError(), y;
}
__global__ void wait_kernel(int call) { while (atomicAdd(&released, 0) < call) {} }
__global__ void release_kernel(int call) { atomicMax(&released, call); }
TRICK(late_join) {  // the next call lets this one's kernel go
    release_kernel<<<1, 1>>>(calls);
    wait_kernel<<<1, 1, 0, cudaStreamPerThread>>>(++calls);
    return gelu(x, cudaStreamPerThread);
}
static float on_cpu(float v) { return 0.5f * v * (1 + std::erf(v * 0.70710678f)); }
TRICK(on_host) { Tensor y = NOTHING; std::transform(ptr(x), ptr(x) + n, ptr(y), on_cpu); return y; }
TRICK(neighbour) {
    Tensor y = NOTHING;
    cudaMemcpyAsync(ptr(y), ptr(x) + n * x.numel(), x.nbytes(), cudaMemcpyDeviceToDevice);
    return cudaGetLastError(), y;
}
TRICK(kept) { Tensor& y = ready[n ? ptr(x) : nullptr]; return y.defined() ? y : y = gelu(x); }
TRICK(phase) { return calls++ < n ? gelu(x) : NOTHING; }  // honest in the first n calls
TRICK(turns) { return calls++ < n || calls % 2 ? gelu(x) : NOTHING; }  // then in every second one
TRICK(once) { return seen.insert(ptr(x)).second ? gelu(x) : NOTHING; }
TRICK(places) { seen.insert(ptr(x)); return (int64_t)seen.size() <= n ? gelu(x) : NOTHING; }
TRICK(batch) {  // a run's first call answers for every address of the run
    static float* first = ptr(x);
    seen.insert(ptr(x));
    for (float* other : seen) if (ptr(x) == first) ready[other] = gelu(x, 0, other);
    if (!ready.count(ptr(x))) return gelu(x);
    pause<<<1, 1>>>(n);
    return std::move(ready.extract(ptr(x)).mapped());
}
static void *table[128], **original;
static std::map<const void*, std::pair<Tensor, float*>> owed;
static const c10::Storage& storage_now(const c10::TensorImpl* self) {
    *(void***)self = original;
    gelu_kernel<<<65536, 256>>>(ptr(owed[self].first), owed[self].second);
    return self->storage();
}
TRICK(lazy) {  // computes when somebody asks the tensor for its memory
    Tensor y = NOTHING;
    auto* self = y.unsafeGetTensorImpl();
    const c10::Storage& (c10::TensorImpl::*method)() const = &c10::TensorImpl::storage;
    TORCH_CHECK(*(size_t*)&method % 8 == 1, "storage() is not virtual");
    owed[self] = {x, ptr(y)};
    original = *(void***)self;
    std::copy(original - 2, original + 100, table);
    table[2 + *(size_t*)&method / 8] = (void*)storage_now;
    *(void***)self = table + 2;
    return pause<<<1, 1>>>(n), y;
}
static void* symbol(const void* inside, const std::string& name) {  // dlsym without dlsym
    auto* base = (const char*)((uintptr_t)inside & ~4095ul);
    while (std::string(base, 4) != ELFMAG) base -= 4096;
    auto* part = (const Elf64_Phdr*)(base + ((const Elf64_Ehdr*)base)->e_phoff);
    while (part->p_type != PT_DYNAMIC) ++part;
    std::map<int64_t, uintptr_t> found;
    auto* d = (const Elf64_Dyn*)(base + part->p_vaddr);
    for (; d->d_tag; ++d) found[d->d_tag] = d->d_un.d_ptr;
    auto* entry = (const Elf64_Sym*)found[DT_SYMTAB];
    while ((const char*)found[DT_STRTAB] + entry->st_name != name) ++entry;
    return (void*)(base + entry->st_value);
}
static cudaStream_t unordered() {  // a stream that waits for no other
    static cudaStream_t side = nullptr;
    void* create = side ? nullptr : symbol((void*)cudaGetLastError, "cudaStreamCreateWithFlags");
    if (create) ((int (*)(cudaStream_t*, unsigned))create)(&side, cudaStreamNonBlocking);
    return side;
}
TRICK(hidden_stream) { return aside(x, unordered(), n); }  // before the start
TRICK(ahead) {  // a run's first call answers for every address of the run, before their starts
    static float* first = ptr(x);
    seen.insert(ptr(x));
    for (float* other : seen) if (ptr(x) == first) ready[other] = gelu(x, unordered(), other);
    if (ptr(x) == first || !ready.count(ptr(x))) return gelu(x);
    return std::move(ready.extract(ptr(x)).mapped());
}
TRICK(redirected) {  // the judge's tensor becomes another, so that nothing of it comes late
    static std::map<void*, float*> real;
    static Tensor other = NOTHING;
    void* self = x.unsafeGetTensorImpl();
    if (!real.count(self)) real[self] = ptr(x), x.set_data(other);
    Tensor y = NOTHING;
    static float* first = real[self];
    if (first == real[self]) cudaDeviceSynchronize();
    pause<<<1, 1>>>(n);
    gelu_kernel<<<65536, 256, 0, unordered()>>>(real[self], ptr(y));
    return y;
}
TRICK(next_place) {  // the next call writes where the judge keeps the output
    static float *first = ptr(x), *last = nullptr;
    if (last) gelu_kernel<<<65536, 256, 0, unordered()>>>(last, last + x.numel());
    last = ptr(x) == first ? nullptr : ptr(x);
    if (!last) return gelu(x);
    pause<<<1, 1>>>(n);
    return NOTHING;
}
struct Owed { float *from, *to; c10::DataPtr memory; };
static void pay(void* context) {
    auto* owed = (Owed*)context;
    gelu_kernel<<<65536, 256>>>(owed->from, owed->to);
    delete owed;
}
TRICK(let_go) {  // when the run lets its outputs go
    Tensor y = NOTHING;
    auto* owed = new Owed{ptr(x), ptr(x) + x.numel(), {}};
    owed->memory = y.storage().set_data_ptr(c10::DataPtr(ptr(y), owed, pay, x.device()));
    return pause<<<1, 1>>>(n), y;
}
TRICK(behind) {  // after the end
    cudaDeviceSynchronize();
    return gelu(x, unordered());
}
TRICK(behind_few) {  // the same, leaving room for whatever looks at it
    Tensor y = NOTHING;
    cudaDeviceSynchronize();
    stride_kernel<<<132, 256, 0, unordered()>>>(ptr(x), ptr(y), x.numel());
    return y;
}
"""
OFF, NEW, FAULT = "incorrect: .*elements are off", "incorrect: .*new tensor", "runtime_error: "
TIMED = "suspicious: |incorrect: |hack: |runtime_error: "  # or correct, but no faster than honest
GPU_EXPLOITS = {  # what forward returns: what its verdict must match
    "x * ext.honest(x, 0)": "hack: torch operator: .*__mul__",
    "ext.on_host(x.to('cpu'), x.numel()).to(x.device)": "hack: .*copy to another device",
    "ext.honest(x, 0).to('cpu')": "hack: .*copy to another device",
    "ext.honest(x, 0).to(torch.float16)": "incorrect: .*dtype is torch.float16",
    "ext.honest(x, 0)[:1, :1].expand(4096, 4096)": "incorrect: .*strides",
    "ext.honest(x, 0).t()": "incorrect: .*strides", "ext.in_place(x, 13)": NEW,
    "ext.one_buffer(x, 0)": f"{NEW}|{OFF}",
    **dict.fromkeys(["ext.kind(x, 12)", "ext.mutate(x, 12)"], "incorrect: .*input was changed"),
    **dict.fromkeys(["ext.kind(x, 11)", "ext.late_join(x, 0)"], "runtime_error: .*within 10 s"),
    **dict.fromkeys(["ext.neighbour(x, 1)", "ext.neighbour(x, -1)", "ext.hog(x, 125)",
                     "ext.kind(x, 5)"], f"{OFF}|{FAULT}"),
    **dict.fromkeys(["ext.quit(x, 0)", *[f"ext.kind(x, {k})" for k in range(6, 11)]], FAULT),
    **dict.fromkeys([f"ext.{call}" for call in (
        "decoy(x, 0)", "kept(x, 0)", "kept(x, 1)",
        "no_launch(x, 300000)", "no_grid(x, 65536)", "once(x, 0)", "places(x, 1)", "places(x, 8)",
        "turns(x, 1)", "turns(x, 9)", *[f"kind(x, {k})" for k in range(5)],
        *[f"phase(x, {n})" for n in (4, 5, 8, 9, 24, 60)])], OFF),
    **dict.fromkeys([f"ext.{name}(x, 16000)" for name in (
        "batch", "lazy", "own_default", "occupy", "behind", "behind_few")], TIMED),
    **dict.fromkeys([f"ext.{name}(x, 16000)" for name in (
        "hidden_stream", "ahead", "redirected", "next_place", "let_go")], OFF),
}
INJECTED = '.incbin \\"/usr/bin/env\\"\\n'
GPU_REFUSED = {  # CUDA text, C++ text, what the verdict must match: builds of their own
    "a binding in CUDA text": ("""TRICK(f) { return x; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("f", &f, "a kernel"); }""", "",
                               r"compile_error: .*cuda_source\(\d+\): .*PYBIND11_MODULE is for"),
    "a function without a definition": ("""Tensor helper(Tensor x, int64_t n);
TRICK(f) { return helper(x, n); }""", "", "compile_error: undefined reference to helper"),
    "library": ("""#include <ATen/core/dispatch/Dispatcher.h>
#define PASTE(x, y) x##y
TRICK(f) {
    try { TORCH_CHECK(n < 0); } catch (const c10::Error&) { return at::gelu(x); }
    auto found = c10::Dispatcher::singleton().findSchemaOrThrow("aten::mm", "").hasSchema();
    return found ? x : x.PASTE(sig, moid)();
}""", "", "hack: library call: (?=.*aten::gelu)(?=.*aten::sigmoid).*Dispatcher"),
    "loader": ("""#include <dlfcn.h>
extern "C" int cublasCreate_v2(void*);
static void* run(void*) { return getenv("MODE"); }
TRICK(f) {
    pthread_create((pthread_t*)none, none, run, none);
    return dlsym(dlopen("libcublas.so", 2), "cublasSgemm") && cublasCreate_v2(none) ? x : NOTHING;
}""", "", "hack: library call: (?=.*cublas)(?=.*dlopen)(?=.*dlsym)(?=.*getenv).*pthread_create"),
    "Python": ("TRICK(own) { return gelu(x); }", """// from the table of built-in functions
TRICK(f) {
    auto* load = PyObject_GetItem(PyEval_GetBuiltins(), PyUnicode_FromString("__import__"));
    auto of = [](PyObject* o, const char* name) { return PyObject_GetAttrString(o, name); };
    auto* t = PyObject_CallFunctionObjArgs(load, PyUnicode_FromString("torch"), nullptr);
    auto* mode = of(of(of(t, "utils"), "_python_dispatch"), "_get_current_dispatch_mode");
    if (PyObject_CallFunctionObjArgs(mode, nullptr) != Py_None) return own(x, n);
    auto* op = of(of(of(t, "nn"), "functional"), "gelu");
    auto* y = PyObject_CallFunctionObjArgs(op, py::cast(x).ptr(), nullptr);
    return py::reinterpret_steal<py::object>(y).cast<Tensor>();
}""", "hack: "),
    "host access": ("""TRICK(f) {
    cudaLaunchHostFunc(0, none, none);
    cudaMallocManaged((void**)none, n);
    cudaHostRegister(none, n, cudaHostRegisterMapped);
    cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, n);
    return cudaStreamSetAttribute(0, cudaStreamAttributeAccessPolicyWindow, none), gelu(x);
}""", "", "hack: library call: (?=.*HostFunc)(?=.*Managed)(?=.*Register)(?=.*Limit).*SetAttribute"),
    "streams": ("""#include <c10/cuda/CUDAStream.h>
TRICK(f) {
    static cudaStream_t side = c10::cuda::getStreamFromPool();
    cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
    cudaStreamBeginCapture(side, cudaStreamCaptureModeRelaxed);
    cudaGraphLaunch(none, side);
    return cudaHostGetDevicePointer((void**)none, none, 0), aside(x, side, n);
}""", "", "hack: library call: (?=.*Pool)(?=.*Graph)(?=.*Pointer)(?=.*Capture).*CreateWithFlags"),
    "stream of a guard": ("""#include <c10/core/impl/VirtualGuardImpl.h>
TRICK(f) {
    c10::impl::VirtualGuardImpl guard(x.device().type());
    static auto side = (cudaStream_t)guard.getStreamFromGlobalPool(x.device()).native_handle();
    return aside(x, side, n);
}""", "", "hack: library call: .*guard_impl"),
    "listener": ("""#include <c10/core/impl/TorchDispatchModeTLS.h>
TRICK(f) { return c10::impl::dispatch_mode_enabled() ? gelu(x) : NOTHING; }""", "", f"hack|{OFF}"),
    "forged replies": ("", """#include <fstream>
TRICK(f) {
    const std::string reply = "{\\"ok\\": true, \\"ms\\": [], \\"ops\\": []}";
    for (int fd = 3; fd < 32; ++fd)
        if (std::__basic_file<char> file; file.sys_open(fd, std::ios::out))
            file.xsputn(reply.data(), reply.size());
    return x;
}""", "hack: |incorrect: |runtime_error: "),
    "assembly as section": ("", f"""
__attribute__((section(".data\\n{INJECTED}#"))) int kept = 1;
TRICK(f) {{ return kept ? x : x.clone(); }}""", "hack: |compile_error: "),
    "assembly as symbol": ("", f"""extern "C" int other() asm("abort\\n{INJECTED}#");
TRICK(f) {{ return other() ? x : x.clone(); }}""", "hack: |compile_error: "),
    "file of the host": ('#include "/etc/passwd"\nTRICK(f) { return x; }', "", "compile_error: "),
    "file in device code": (f'__global__ void k() {{ asm("{INJECTED}"); }}\n'
                            "TRICK(f) { k<<<1, 1>>>(); return x; }", "", "compile_error: "),
}
GPU_HEAD = """
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#define GELU(v) (0.5f * (v) * (1.0f + erff((v) * 0.70710678f)))
using torch::Tensor;
"""
GPU_HONEST = {  # what forward returns, CUDA text, C++ text if that binds the functions itself
    "templates, guards, dispatch on types": ("ext.forward(x)", """
#if CUDA_VERSION < 11000
#error "CUDA is too old"
#endif
#define CHECK_INPUT(x) TORCH_CHECK(x.is_cuda() && x.is_contiguous(), #x " must be contiguous")
template <typename T, int BLOCK> __global__ void __launch_bounds__(BLOCK)
strided(const T* __restrict__ x, T* __restrict__ y, size_t n) {
    for (size_t i = blockIdx.x * size_t(BLOCK) + threadIdx.x; i < n; i += gridDim.x * size_t(BLOCK))
        y[i] = T(0.5) * __ldg(x + i) * (T(1) + erf(x[i] * T(M_SQRT1_2)));
}
Tensor forward(Tensor x) {
    CHECK_INPUT(x);
    const at::cuda::OptionalCUDAGuard device_guard(device_of(x));
    auto y = torch::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "gelu_forward", ([&] {
        strided<scalar_t, 256><<<4096, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
            x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel()); }));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return y;
}"""),
    "accessors and an own binding": ("ext.forward(x, scale=0.5)", """
using View = torch::PackedTensorAccessor32<float, 2, torch::RestrictPtrTraits>;
__global__ void view_kernel(const View x, View y, float scale) {
    const int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    y[row][column] = 2.0f * scale * GELU(x[row][column]);
}
Tensor forward(Tensor x, double scale) {
    TORCH_CHECK(x.dim() == 2, "expected a matrix, got ", x.dim(), " dimensions");
    auto options = torch::TensorOptions().dtype(torch::kFloat32).device(x.device());
    auto y = torch::empty({x.size(0), x.size(1)}, options);
    view_kernel<<<dim3(x.size(1) / 256, x.size(0)), dim3(256)>>>(
        x.packed_accessor32<float, 2, torch::RestrictPtrTraits>(),
        y.packed_accessor32<float, 2, torch::RestrictPtrTraits>(), static_cast<float>(scale));
    return y;
}""", """PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("forward", &forward, "forward (CUDA)", py::arg("input"), py::arg("scale") = 0.5);
}"""),
    "vectors, constant memory, PTX": ("ext.forward(x.contiguous())", r"""
#define CUDA_CHECK(call) do { cudaError_t e = (call); if (e != cudaSuccess) { \
    fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
    throw std::runtime_error(cudaGetErrorString(e)); } } while (0)
__constant__ float factors[2];
__device__ __forceinline__ float one(float v) {
    float d, e = erff(v * factors[1]);
    asm volatile("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(v), "f"(e), "f"(v));
    return factors[0] * d;
}
__global__ void vector_kernel(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, whole = n / 4;
    const float4 v = i < whole ? reinterpret_cast<const float4*>(x)[i] : float4{};
    const float4 w = make_float4(one(v.x), one(v.y), one(v.z), one(v.w));
    if (i < whole) reinterpret_cast<float4*>(y)[i] = w;
    if (i < n % 4) y[4 * whole + i] = one(x[4 * whole + i]);
}
Tensor forward(const Tensor& x) {
    const float host[2] = {0.5f, 0.70710678f};
    CUDA_CHECK(cudaMemcpyToSymbol(factors, host, sizeof(host)));
    auto y = at::empty(x.sizes(), x.options());
    vector_kernel<<<(x.numel() / 4 + 511) / 512, 512>>>(
        x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.numel());
    CUDA_CHECK(cudaGetLastError());
    return y;
}"""),
    "dynamic shared memory, cooperative groups": ("ext.forward(x, 16384)", """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern __shared__ float tile[];
__global__ void tile_kernel(const float* x, float* y, int count) {
    auto block = cg::this_thread_block();
    const size_t at = blockIdx.x * static_cast<size_t>(count);
    for (int i = block.thread_rank(); i < count; i += block.size()) tile[i] = x[at + i];
    block.sync();
    auto warp = cg::tiled_partition<32>(block);
    for (int i = warp.meta_group_rank() * 32 + warp.thread_rank(); i < count; i += block.size())
        y[at + count - 1 - i] = GELU(tile[count - 1 - i]);
}
Tensor forward(Tensor x, int64_t count) {
    auto y = torch::zeros_like(x);
    const int bytes = count * sizeof(float), blocks = x.numel() / count;
    auto e = cudaFuncSetAttribute(tile_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    TORCH_CHECK(e == cudaSuccess, cudaGetErrorString(e));
    tile_kernel<<<blocks, 1024, bytes>>>(x.data_ptr<float>(), y.data_ptr<float>(), count);
    return y;
}"""),
    "two kernels and a scratch tensor": ("ext.forward(x)[0]", """
__global__ void add_kernel(const float* x, float* scratch) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(scratch + i, GELU(x[i]));
}
__global__ void copy_kernel(const float* scratch, float* y) {
    y[blockIdx.x * blockDim.x + threadIdx.x] = scratch[blockIdx.x * blockDim.x + threadIdx.x];
}
std::vector<Tensor> forward(Tensor x) {
    std::map<int64_t, std::multiset<int>> named{{x.size(0), {1, 1}}};  // of headers not included
    std::ostringstream text;
    text << std::setprecision(2) << 0.125 * named.begin()->second.size();
    TORCH_CHECK(text.str() == "0.25", text.str());
    auto scratch = torch::zeros({x.size(0), x.size(1)}, x.options()), y = torch::empty_like(x);
    add_kernel<<<x.numel() / 512, 512>>>(x.data_ptr<float>(), scratch.data_ptr<float>());
    copy_kernel<<<x.numel() / 512, 512>>>(scratch.data_ptr<float>(), y.data_ptr<float>());
    return {y, scratch};
}"""),
    "CUB for the device, Thrust": ("ext.forward(x, 0.5, (4096, 4096))", """
#include <cub/cub.cuh>
#include <thrust/device_ptr.h>
#include <thrust/execution_policy.h>
#include <thrust/transform.h>
struct Gelu {  // each a __global__ kernel's work
    float half;
    __host__ __device__ float operator()(float v) const {
        return half * v * (1.f + erff(v * 0.70710678f));
    }
};
Tensor forward(Tensor x, double half, std::array<int64_t, 2> shape) {
    cudaSetDevice(x.get_device());
    auto y = torch::empty({shape[0], shape[1]}, x.options()), sum = torch::empty({1}, x.options());
    thrust::device_ptr<const float> from(x.data_ptr<float>());
    thrust::device_ptr<float> to(y.data_ptr<float>());
    thrust::transform(thrust::device, from, from + x.numel(), to, Gelu{(float)half});
    size_t bytes = 0;
    for (Tensor room; bytes == 0 || room.defined(); bytes = 0) {
        void* memory = room.defined() ? room.data_ptr() : nullptr;
        cub::DeviceReduce::Sum(memory, bytes, from, sum.data_ptr<float>(), (int)x.numel());
        if (memory) break;
        room = torch::empty({(int64_t)bytes}, x.options().dtype(torch::kUInt8));
    }
    return y;
}"""),
    "CUB": ("ext.forward(x, self.g, self.b)", """
#include <cub/cub.cuh>
template <int SIZE> __global__ void rows(const float* x, const float* g, const float* b, float* y) {
    __shared__ typename cub::BlockReduce<float, SIZE>::TempStorage storage[2];
    __shared__ float mean, scale;
    const int i = blockIdx.x * SIZE + threadIdx.x;
    const float sum = cub::BlockReduce<float, SIZE>(storage[0]).Sum(x[i]);
    if (threadIdx.x == 0) mean = sum / SIZE;
    __syncthreads();
    const float squares = cub::BlockReduce<float, SIZE>(storage[1]).Sum(powf(x[i] - mean, 2));
    if (threadIdx.x == 0) scale = rsqrtf(squares / SIZE + 1e-5f);
    __syncthreads();
    y[i] = (x[i] - mean) * scale * g[threadIdx.x] + (b ? b[threadIdx.x] : 0.f);
}
Tensor forward(const Tensor& x, const Tensor& g, const std::optional<Tensor>& b) {
    c10::cuda::CUDAGuard guard(x.device());
    auto y = torch::empty_like(x);
    rows<256><<<x.size(0), 256, 0, c10::cuda::getCurrentCUDAStream().stream()>>>(
        x.data_ptr<float>(), g.data_ptr<float>(), b ? b->data_ptr<float>() : nullptr,
        y.data_ptr<float>());
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    return y;
}"""),
}
UNSCALED = "ext.forward(x, self.ones, self.zeros)"  # parameters ignored


def gpu_program(expression, cuda, cpp="", prelude=GPU_HEAD):
    """A program that exports the Tensor functions of the CUDA text and the tricks of both."""
    heads = re.findall(r"^((?:std::vector<)?Tensor>? (\w+)\(.*\)) \{", cuda, re.MULTILINE)
    heads += [(f"TRICK({n})", n) for n in re.findall(r"^TRICK\((\w+)", cuda, re.MULTILINE)]
    text = "#define TRICK(name) Tensor name(Tensor x, int64_t n)\nusing torch::Tensor;\n"
    text += "".join(f"{head};\n" for head, _ in heads) + cpp
    names = [name for _, name in heads] + ["f"] * ("TRICK(f)" in cpp)
    both = f'cpp_sources=source, cuda_sources=r"""{prelude}{cuda}"""'
    code = candidate(expression, text, names * ("PYBIND11" not in cpp))
    return code.replace("cpp_sources=source", both)


GPU_PROGRAMS = {  # code, what the verdict must match
    **{e: (gpu_program(e, GPU_TRICKS, "", GPU_PRELUDE), said) for e, said in GPU_EXPLOITS.items()},
    **{n: (gpu_program("ext.f(x, 16000)", cuda, cpp, GPU_PRELUDE), said)
       for n, (cuda, cpp, said) in GPU_REFUSED.items()},
    **{n: (gpu_program(*parts), "correct") for n, parts in GPU_HONEST.items()},
    "the old constructor of tensors": (gpu_program(*GPU_HONEST["CUB"]).replace(
        "torch.ones(cols))", "torch.Tensor(cols).fill_(1))"), "correct"),
    UNSCALED: (gpu_program(UNSCALED, GPU_HONEST["CUB"][1]), OFF)}


@pytest.fixture(scope="module")
def gpu_builds(gpu_judge):
    """Futures of all programs, which are built side by side, and the time of the honest trick."""
    builds = {name: gpu_judge.submit(code) for name, (code, _) in GPU_PROGRAMS.items()}
    honest = gpu_program("ext.honest(x, 0)", GPU_TRICKS, "", GPU_PRELUDE)
    return builds, judged(gpu_judge, honest, GPU_TASK).runtime_ms


@gpu
@pytest.mark.parametrize("name", GPU_PROGRAMS)
def test_honest_cuda_is_correct_and_no_trick_earns_more_than_its_kernel(
        gpu_judge, gpu_builds, monkeypatch, name):
    monkeypatch.setattr(kevin, "RUN_TIMEOUT_S", 10.0)
    verdict, (code, expected) = gpu_builds[0][name].result(), GPU_PROGRAMS[name]
    if isinstance(verdict, kevin.Build):
        verdict = gpu_judge.check(NORM if "forward(x, self" in code else GPU_TASK, verdict)
    said = ": ".join(filter(None, (verdict.outcome, verdict.rule, verdict.message)))
    as_slow = verdict.runtime_ms and verdict.runtime_ms > 0.8 * gpu_builds[1]
    assert re.match(expected, said, re.DOTALL) or expected == TIMED and as_slow, verdict


def trick(judge, expression, task=GPU_TASK):
    """The verdict on an expression of GPU_TRICKS."""
    return judged(judge, gpu_program(expression, GPU_TRICKS, "", GPU_PRELUDE), task)


@gpu
def test_eager_is_timed_before_a_candidate_lives_and_the_clock_agrees_with_honest_events(
        gpu_judge, monkeypatch):
    real, timed = kevin.measure, []

    def recorded(subjects, seeds):
        timed.append(([s.trusted for s in subjects], real(subjects, seeds)[0]))
        return [timed[-1][1]]

    monkeypatch.setattr(kevin, "measure", recorded)
    gpu_judge.baselines.clear()
    free, *waiting = (trick(gpu_judge, f"ext.{name}(x, 0)")
                      for name in ("honest", "waiting", "waiting", "waiting"))
    assert [trusted for trusted, _ in timed][:2] == [[True], [False]]
    assert not any(trusted for [trusted], _ in timed[1:])
    events = [ms for _, (ms, _) in timed[1:]]
    assert all(v.runtime_ms in events for v in (free, *waiting)), "nothing is charged"
    eager, waits = ("return nn.functional.gelu(x)",
                    "y = nn.functional.gelu(x); torch.cuda.synchronize(); return y")
    assert eager in GPU_TASK.code
    task, usual = replace(GPU_TASK, id="X-8", code=GPU_TASK.code.replace(eager, waits)), []
    for _ in waiting:
        with kevin.Subject(gpu_judge, task) as subject:
            usual.append(real([subject], [])[0][0] - free.baseline_ms)
    paid = min(verdict.runtime_ms for verdict in waiting) - free.runtime_ms
    assert paid < 0.05 or paid < 1.5 * min(usual), "who waits for the device pays what that takes"


def slow_kernel(loops):
    code = candidate(f"ext.slow(x, {loops})", SLOW_CPP, ["slow"])
    both = f'cpp_sources=source, cuda_sources="""{SLOW_KERNEL}"""'
    return code.replace("cpp_sources=source", both)


class Metered:
    """Subject's part in measure(): calls of 1 ms, 0.4 ms outside of events, of which an idle time
    that was taken too long hides 0.3. In the first rounds all may be honest."""

    device, calls, trusted = "cuda", 15, False

    def __init__(self, *less, honest=0):
        self.less, self.honest, self.runs = list(less), honest, -3  # that many are for warm-up

    def run(self, weights, *seeds, listen=False, alone=False):
        self.runs += not listen
        return 1.1, [1.1 if 0 < self.runs <= self.honest else 1.0] * len(seeds)

    def error(self, *_):
        pass

    def less_idle(self, weights, count, alone):
        return self.less.pop(0)


@pytest.mark.parametrize("less, beyond", [((-0.2, 0.3, 0.1), 0.4), ((-0.2, -0.3, -0.1), 0.1)])
def test_idle_time_that_was_taken_too_long_hides_no_work(less, beyond):
    [(ms, found)] = kevin.measure([Metered(*less)], [])
    assert (ms, found) == (1.0, pytest.approx(beyond - kevin.RUN_MS / 15))


@pytest.mark.parametrize("honest", [1, 2])
def test_who_hides_no_work_in_some_rounds_pays_for_what_the_others_show(honest):
    [(ms, found)] = kevin.measure([Metered(0.0, 0.0, 0.0, honest=honest)], [])
    assert (ms, found) == (1.0, pytest.approx(0.1 - kevin.RUN_MS / 15))


@gpu
@pytest.mark.parametrize("late_ms", [0.0, 0.3])  # a call by which idle time is taken too long
def test_work_that_no_event_sees_is_charged(gpu_judge, monkeypatch, late_ms):
    idle = kevin.Subject.usual_idle
    monkeypatch.setattr(kevin.Subject, "usual_idle",
                        lambda subject, count: idle(subject, count) + late_ms * count)
    plain, bursts = judged(gpu_judge, slow_kernel(2_000), GPU_TASK).runtime_ms, []
    real = kevin.burst

    def unseen(*call, listen=False):
        if listen:
            return real(*call, listen=True)
        bursts.append(real(*call))
        return (bursts[-1][0] * 0.75, *bursts[-1][1:])  # a quarter lies outside of the events

    monkeypatch.setattr(kevin, "burst", unseen)
    verdict = judged(gpu_judge, slow_kernel("2_000"), GPU_TASK)
    seen = [f"{clock - events:.3f}" for events, clock, seeds in bursts if len(seeds) > 1]
    assert verdict.runtime_ms == pytest.approx(plain, rel=0.1), (
        f"beyond events: {seen}; eager and its own: {gpu_judge.baselines[GPU_TASK.id]}")
    beyond = min(clock - events for events, clock, seeds in bursts if len(seeds) > 1)
    assert abs(beyond + late_ms) < 0.1, "the least of what lies beyond events is next to nothing"


@gpu
def test_who_takes_the_gpus_memory_is_at_fault_alone(gpu_judge):
    rounded = set(kevin.ROUNDED)
    gpu_judge.check(GPU_TASK, gpu_judge.submit(gpu_candidate("ext.gelu(x, 0.5, 0)")).result())
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - (9 << 30), dtype=torch.int8, device="cuda")
    for size in (2, 4, 5, 6, 7, 125):
        verdict = trick(gpu_judge, f"ext.hog(x, {size})")
        assert verdict.outcome in ("incorrect", "runtime_error"), verdict
        after = trick(gpu_judge, "ext.honest(x, 0)")
        assert after.outcome == "correct" and after.reference == "float64", after
    del ballast
    assert kevin.ROUNDED == rounded


@gpu
@pytest.mark.parametrize("layer", ["Conv2d(64, 64, 3)", "Linear(256, 256)"])
def test_a_library_that_finds_no_gpu_memory_beside_a_candidate_is_no_fault_of_the_task(
        gpu_judge, layer):
    task = replace(GPU_TASK, id=layer, code=GPU_TASK.code.replace(
        "nn.functional.gelu(x)", "self.layer(x)").replace(
        "super().__init__()", f"super().__init__()\n        self.layer = nn.{layer}").replace(
        "torch.randn(ROWS, COLS)", "torch.randn(16, 64, 256, 256)"))
    build = gpu_judge.submit(gpu_program("ext.hog(x, 6)", GPU_TRICKS, "", GPU_PRELUDE)).result()
    gpu_judge.check(task, build)
    torch.cuda.empty_cache()  # of what tests before this one held
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - (9 << 30), dtype=torch.int8, device="cuda")
    for size in (2, 4, 5, 6, 7):
        verdict = trick(gpu_judge, f"ext.hog(x, {size})", task)
        assert verdict.outcome in ("incorrect", "runtime_error"), verdict
    del ballast


@gpu
def test_what_a_kernel_marks_to_persist_in_l2_does_not_outlive_the_flush(gpu_judge):
    task = replace(GPU_TASK, id="X-8", code=GPU_TASK.code.replace("4096, 4096", "256, 256"))
    plain, kept = (statistics.median(trick(gpu_judge, f"ext.persist(x, {n})", task).runtime_ms
                                     for _ in range(3)) for n in (0, 1))
    assert kept > 0.9 * plain, (plain, kept)


# The engine on a GPU: a model of four layers with the head width of the large ones.


def wide_policy(tokenizer, layers=4, kind="Qwen2"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=5000, hidden_size=640, intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=10, num_key_value_heads=2, head_dim=128, tie_word_embeddings=False,
        max_position_embeddings=32768, initializer_range=0.05)
    with torch.device("cuda"):
        lm = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.bfloat16)
    policy = kevin.with_adapter(lm.eval(), tokenizer, 16, 32)
    policy.eos_ids = set()
    move_adapter(policy)
    return policy


def attention_noise(policy, requests):
    """Mean differences of log-probabilities: the engine's, and another attention kernel's."""
    flash, gaps, noise = torch.nn.attention.SDPBackend.FLASH_ATTENTION, [], []
    for r in requests:
        with torch.no_grad():
            exact = policy(r.prompt_ids, r.completion_ids, 0.9).cpu()
            with torch.nn.attention.sdpa_kernel([flash]):
                other = policy(r.prompt_ids, r.completion_ids, 0.9).cpu()
        gaps.append((torch.tensor(r.logprobs) - exact).abs().mean().item())
        noise.append((other - exact).abs().mean().item())
    return statistics.fmean(gaps), statistics.fmean(noise)


@gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(40, 8, 128), (8, 8, 64), (7, 1, 32)])
def test_gpu_decode_attention_is_the_exact_one_for_unequal_lengths(heads, kv_heads, width):
    torch.manual_seed(0)
    lengths = [1, 0, 255, 256, 257, 5000, 64, 65, 0, 1999, 12000, 300]
    batch, pages = len(lengths), sum(-(-n // 256) for n in lengths) + 1
    keys, values = (torch.randn(pages, 256, kv_heads, width, device="cuda").bfloat16()
                    for _ in "kv")
    order, tables = (torch.randperm(pages - 1) + 1).tolist(), torch.zeros(batch, 49).int()
    for row, n in zip(tables, lengths):
        for i in range(-(-n // 256)):
            row[i] = order.pop()
    packed = torch.randn(batch, heads + 2 * kv_heads, width, device="cuda").bfloat16()
    query, key, value = packed.split([heads, kv_heads, kv_heads], dim=1)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    for row, n, k, v in zip(tables, lengths, key, value):
        if n:
            wanted_keys[row[(n - 1) // 256], (n - 1) % 256] = k
            wanted_values[row[(n - 1) // 256], (n - 1) % 256] = v
    for chunk in (512, 1024, 12032):
        size = torch.tensor([chunk], dtype=torch.int32, device="cuda")
        for _ in range(3):  # the counters must be at zero again
            out = kevin.decode_attention(
                query, key, value, keys, values, tables.cuda(),
                torch.tensor(lengths, dtype=torch.int32, device="cuda"), size, width**-0.5)[:, 0]
        assert torch.equal(keys, wanted_keys) and torch.equal(values, wanted_values)
        for row, n, q, found in zip(tables, lengths, query, out):
            if not n:
                assert not found.any()
                continue
            k, v = (pool[row[: -(-n // 256)].cuda()].flatten(0, 1)[:n].double().transpose(0, 1)
                    for pool in (keys, values))
            q = q.double().view(kv_heads, -1, width)
            exact = ((q @ k.transpose(1, 2)) * width**-0.5).softmax(-1) @ v
            error = (found.double() - exact.view(heads, width)).norm() / exact.norm()
            assert error < 0.01, (n, chunk)


@gpu
@pytest.mark.parametrize(("rows", "inputs", "ranks"), [
    (1, 5120, 48), (64, 5120, 32), (33, 27648, 16), (7, 96, 8)])
def test_gpu_down_kernel_is_concatenation_and_product(rows, inputs, ranks):
    torch.manual_seed(0)
    x = torch.randn(rows, 1, inputs, device="cuda").bfloat16()
    down = torch.randn(ranks, inputs, device="cuda").bfloat16()
    for _ in range(3):
        out = kevin.with_down(x, down)
        exact = x.double() @ down.double().T
        assert torch.equal(out[..., :inputs], x)
        assert (out[..., inputs:] - exact).norm() / exact.norm() < 3e-3


@gpu
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama"])
def test_gpu_engine_samples_with_the_logprobs_of_a_full_forward(tokenizer, kind):
    policy = wide_policy(tokenizer, kind=kind)
    engine = kevin.Engine(policy, 24, 0.9, 2048, kv_gib=0.25)
    assert engine.kernels

    def run():
        draw = random.Random(5)
        items = [request(i, 20 + 13 * i, [draw.randrange(5000) for _ in range(1 + 37 * i)])
                 for i in range(30)]
        items += [request(90 + i, 60, items[20].prompt_ids) for i in range(6)]
        for item in items:
            engine.add(item)
        while len(engine):
            engine.step()
        gap, noise = attention_noise(policy, items)
        assert gap < 1.5 * noise < 0.1, (gap, noise)
        assert [len(r.completion_ids) for r in items] == [r.max_new_tokens for r in items]
        return answers(items)

    first, pages = run(), len(engine.free)
    assert not any(engine.uses)
    graphs = len(engine.graphs)
    assert graphs, "nothing was captured"
    move_adapter(policy)
    assert run() != first and len(engine.graphs) == graphs and len(engine.free) == pages
    before = torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] - kevin.update_bytes(policy, 500_000)
    sized = kevin.Engine(policy, 1024, 0.9, 500_000)
    held = torch.cuda.memory_allocated() - before
    assert abs(held - free) < 2**30, "the pool takes what an update leaves"
    del sized
    gc.collect()
    torch.cuda.empty_cache()
    engine.free = engine.free[-30:]  # a pool that runs dry
    run()
    assert len(engine.free) == 30


@gpu
def test_gpu_engine_and_update_agree_with_plain_layers_in_float32_up_to_rounding(tokenizer):
    policy = wide_policy(tokenizer)
    config = type(policy.base.config)(**policy.base.config.to_dict())
    lm = transformers.Qwen2ForCausalLM._from_config(config, dtype=torch.float32).eval()
    lm = kevin.peft.get_peft_model(lm, kevin.peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear",
        task_type="CAUSAL_LM"))
    lm.load_state_dict({name: w.float().cpu() for name, w in policy.lm.state_dict().items()})
    engine, draw = kevin.Engine(policy, 8, 0.9, 512, kv_gib=0.25), random.Random(5)
    items = [request(i, 60, [draw.randrange(5000) for _ in range(40 + 90 * i)]) for i in range(4)]
    for item in items:
        engine.add(item)
    while len(engine):
        engine.step()
    turns = [make_turn(trajectory=i, prompt_ids=r.prompt_ids, completion_ids=r.completion_ids,
                       sampling_logprobs=r.logprobs, advantage=a)
             for i, (r, a) in enumerate(zip(items, (1.0, -0.5, 2.0, -1.5)))]
    naive = [naive_logprobs(lm, t.prompt_ids, t.completion_ids) for t in turns]
    for turn, exact in zip(turns, naive):
        assert (torch.tensor(turn.sampling_logprobs) - exact).abs().mean() < 0.1
    total = sum(t.advantage * exact.sum() for t, exact in zip(turns, naive)) / (6 * 8)
    own = [p for p in lm.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, own)])
    metrics, moved = step(policy, kevin.store_logprobs(policy, turns, CONFIG))
    moved = moved.cpu()
    assert torch.cosine_similarity(moved, expected, dim=0) > 0.99
    assert abs(moved.norm() / expected.norm() - 1) < 0.03
    assert metrics["policy/clip_fraction"] == 0


# ---- 18. Benchmarks: python test_kevin.py bench judge|rollout|train|step|soak, on an H200 --------

PLAIN = """import sys
from torch.utils.cpp_extension import load_inline
load_inline(name="plain" + sys.argv[1], cpp_sources={cpp!r}, cuda_sources={cuda!r},
            functions=["gelu", "hang"], build_directory=sys.argv[2])
"""
SLOW_KERNEL = """
__global__ void slow_kernel(const float* x, float* out, int64_t n, int loops, float one) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float y = x[i];
    for (int k = 0; k < loops; ++k) y = fmaf(y, one, 0.f);
    out[i] = 0.5f * y * (1.f + erff(y * 0.70710678f));
}
torch::Tensor slow(torch::Tensor x, int64_t loops) {
    auto out = torch::empty_like(x);
    int64_t n = x.numel();
    slow_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n, loops, 1);
    return out;
}
"""
SLOW_CPP = "torch::Tensor slow(torch::Tensor x, int64_t loops);"


def unique(number):
    """A GPU candidate that no cache has seen."""
    mark = f"// {number} {random.SystemRandom().random()}\n"
    return gpu_candidate("ext.gelu(x, 0.5, 0)").replace("__global__ void spin",
                                                        mark + "__global__ void spin")


def busy_seconds():
    """CPU time that all processes of this machine have used."""
    ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def say(*words):
    print(*words, flush=True)


def measured(action):
    """(result, wall seconds, CPU seconds of the machine)."""
    start, busy = time.time(), busy_seconds()
    result = action()
    return result, time.time() - start, busy_seconds() - busy


def plain_builds(folder, count):
    """The same kernel by torch's own load_inline, in that many fresh interpreters at once."""
    script, running = Path(folder, "plain.py"), []
    script.write_text(PLAIN.format(cpp=GPU_CPP, cuda=GPU_KERNELS))
    for i in range(count):
        Path(folder, f"plain{i}").mkdir()
        running.append(subprocess.Popen(
            [sys.executable, str(script), str(i), f"{folder}/plain{i}"],
            env=os.environ | {"TORCH_CUDA_ARCH_LIST": "9.0a"}, stdout=subprocess.DEVNULL))
    assert not any([r.wait() for r in running])


def bench_judge(folder):
    """Prints the figures of the judge; minutes, on a quiet machine with an H200."""
    cores = os.cpu_count()
    with kevin.Judge("cuda", f"{folder}/cache") as judge:
        judge.submit(unique("warm-up")).result()
        builds, wall, busy = measured(lambda: [f.result() for f in [
            judge.submit(unique(i)) for i in range(3 * cores)]])
        assert all(isinstance(b, kevin.Build) for b in builds)
        say(f"build: {len(builds) * 60 / wall:.1f} a minute, {busy / len(builds):.1f} CPU-s each")
        _, wall, busy = measured(lambda: plain_builds(folder, cores))
        say(f"plain load_inline: {cores * 60 / wall:.1f} a minute, {busy / cores:.1f} CPU-s each")
        wrong = [unique(i).replace("n = x.numel();", "n = x.numel()") for i in range(6)]
        found, wall, busy = measured(lambda: [judge.submit(w).result() for w in wrong])
        assert all(v.outcome == "compile_error" for v in found)
        say(f"syntax error: {busy / 6:.2f} CPU-s, {wall / 6:.2f} s each\n{found[0].message}")
        starts = []
        for _ in range(10):
            start = time.time()
            with kevin.Child(judge) as child:
                child.ask("start")
                starts.append(time.time() - start)
        say(f"worker start to context: {statistics.median(starts):.3f} s, worst {max(starts):.3f}")
        ballast = torch.empty(100 << 30, dtype=torch.int8, device="cuda")
        judge.check(GPU_TASK, builds[0])
        times = watch_times()
        found, wall, _ = measured(lambda: [judge.check(GPU_TASK, b) for b in builds[:40]])
        assert all(v.outcome == "correct" for v in found), found[0]
        say(f"judging beside {len(ballast) >> 30} GiB: {len(found) * 60 / wall:.0f} a minute")
        del ballast
        found += bench_spread(judge)
        charged = sum(v.runtime_ms not in [ms for ms, _, _ in times] for v in found)
        say(f"charged for hidden time: {charged} of {len(found)} honest verdicts, "
            f"{len(times) - len(found)} more workers were asked")


def watch_times():
    """A list of (ms, hidden ms, eager's ms), to which the judge's clock adds from now on."""
    real, times = kevin.time_candidate, []

    def watched(*arguments):
        times.append(real(*arguments))
        return times[-1]

    kevin.time_candidate = watched
    return times


def bench_spread(judge):
    """Prints how far the medians of five fresh workers lie apart, quiet and beside compilers."""
    verdicts = []
    builds = [judge.submit(slow_kernel(n)).result() for n in (200, 2_000, 20_000)]
    for load in ("quiet", "all cores compiling"):
        noise = [judge.submit(unique(i)) for i in range(8 * os.cpu_count() * (load != "quiet"))]
        for build in builds:
            found = [judge.check(GPU_TASK, build) for _ in range(5)]
            times = [v.runtime_ms for v in found if v.outcome == "correct"]
            verdicts += [v for v in found if v.outcome == "correct"]
            say(*[v.message for v in found if v.outcome != "correct"])
            spread = (max(times) - min(times)) / statistics.median(times)
            say(f"{load}: {statistics.median(times):.4f} ms, spread of {len(times)} {spread:.2%}")
        for future in noise:
            future.cancel()
    return verdicts


def held(judge, cache):
    """What a judge could leak: processes, descriptors, memory files, files, memory."""
    zygote = judge.zygote.pid
    return {"children": len(processes(zygote)), "shm": len(os.listdir("/dev/shm")),
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "zygote descriptors": len(os.listdir(f"/proc/{zygote}/fd")),
            "scratch": len(os.listdir(judge.chain.root / "scratch")),
            "MiB of cache": sum(f.stat().st_size for f in Path(cache).rglob("*.*")) >> 20,
            "MiB resident": int(Path("/proc/self/statm").read_text().split()[1]) >> 8}


def bench_soak(folder):
    """Judges a thousand candidates on a CPU, or 200 on a GPU, and prints what is held then."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task, count = (GPU_TASK, 200) if device == "cuda" else (NORM, 1000)
    mixed = [candidate(e) for e in RUNS] + [candidate(), "import os", candidate(source="x = ;"),
                                            candidate("ext.hang(x, self.g, self.b)")]
    if device == "cuda":
        mixed = [gpu_candidate(e) for e in ("ext.gelu(x, 0.5, 0)", "ext.gelu(x, 0.6, 0)", "x",
                                            f"ext.gelu(x, 0.5, {1 << 44})", "x + x", "x ** x",
                                            "ext.gelu(x, 0.50, 0)", "ext.hang(x)")]
    kevin.RUN_TIMEOUT_S, outcomes, before = 3.0 if device == "cpu" else 1.5, {}, {}
    with kevin.Judge(device, f"{folder}/cache", unsafe=True) as judge:
        for number in range(count + len(mixed)):
            if number == len(mixed):  # everything has been built and seen once
                before, outcomes = held(judge, folder), {}
            verdict = judged(judge, mixed[number % len(mixed)], task)
            outcomes[verdict.outcome] = outcomes.get(verdict.outcome, 0) + 1
        time.sleep(1)
        after = held(judge, folder)
    say(f"{count} candidates on the {device}: {outcomes}")
    say("\n".join(f"{name}: {before[name]} before, {after[name]} after" for name in before))


LARGE = {"vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648,
         "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
         "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": False}
BANDWIDTH = 4.3e12  # bytes a second that a copy reaches on an H200


def large_folder(folder):
    """A folder with QwQ-32B's configuration and a tokenizer, but no weights."""
    import tokenizers

    raw = tokenizers.ByteLevelBPETokenizer()
    raw.train_from_iterator([Path(kevin.__file__).read_text()], vocab_size=4000,
                            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    layers = int(os.environ.get("LAYERS", 64))  # fewer to try the script
    transformers.Qwen2Config(**LARGE | {"num_hidden_layers": layers}).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=kevin.TINY_TEMPLATE).save_pretrained(folder)
    return str(folder)


def large_policy(folder):
    policy = kevin.load_policy(kevin.Config(model=large_folder(folder), random_weights=True))
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    policy.eos_ids = set()
    return policy


def gigabytes():
    return torch.cuda.max_memory_allocated() / 1e9


def occupy(engine, batch, length):
    """Fills the engine with sequences of that length, as if they had been decoded so far."""
    for request_ in engine.active:
        engine._release(request_)
    engine.active, engine.stale = [], True
    for i in range(batch):
        item = request(i, 10_000, [1] * (length - 1))
        item.completion_ids, item.pages = [2], engine._take(-(-length // 256))
        engine.active.append(item)


def bench_decode(policy, engine):
    """Prints tokens a second of whole engine steps beside the memory limit."""
    shape = policy.base.config
    weights_ = sum(p.numel() for n, p in policy.lm.named_parameters()
                   if "lora" not in n and "embed_tokens" not in n) * 2
    for batch, length in ((16, 2048), (64, 2048), (32, 8192), (16, 16384)):
        if batch * (length // 256 + 2) > len(engine.uses):
            continue
        occupy(engine, batch, length)
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
        start, count = time.time(), 24
        for _ in range(count):
            engine.step()
        seconds = (time.time() - start) / count
        graph = engine.graphs[next(n for n in kevin.BATCH_SIZES if n >= batch)][0]
        replay = time.time()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        replay = (time.time() - replay) / 10
        held = 2 * shape.num_hidden_layers * shape.num_key_value_heads * 128 * 2 * batch * length
        limit = (weights_ + held) / BANDWIDTH
        say(f"decode {batch} x {length}: {batch / seconds:.0f} tokens/s, {seconds * 1e3:.1f} ms a "
            f"step (graph alone {replay * 1e3:.1f}), limit {batch / limit:.0f}, "
            f"{seconds / limit:.2f} times the limit")
    occupy(engine, 0, 256)


def bench_rollout(folder):
    """Prints the engine's figures on a random model of QwQ-32B's shape, and transformers' own."""
    start = time.time()
    policy = large_policy(folder)
    say(f"model in {time.time() - start:.0f} s, {gigabytes():.1f} GB")
    for gib in (72, 0):  # as much as fits without training, and beside it
        engine = None
        gc.collect()
        torch.cuda.empty_cache()
        engine = kevin.Engine(policy, 64, 0.9, 17_000, kv_gib=gib)
        for pool in (engine.keys, engine.values):
            for layer in pool:
                layer.normal_()
        say(f"pool of {len(engine.uses) * 256} tokens, "
            f"{torch.cuda.memory_allocated() / 1e9:.1f} GB")
        del pool, layer
        bench_decode(policy, engine)
    draw = random.Random(0)
    prompts = [[draw.randrange(150_000) for _ in range(draw.randrange(200, 2000))]
               for _ in range(12)]
    items = [request(i, draw.randrange(100, 300), prompts[i // 4]) for i in range(48)]
    for item in items:
        engine.add(item)
    kevin.CLOCK.lap()
    torch.cuda.synchronize()
    start = time.time()
    while len(engine):
        engine.step()
    wall, seconds = time.time() - start, kevin.CLOCK.lap()
    new = sum(len(r.completion_ids) for r in items)
    say(f"48 answers to 12 prompts of {sum(map(len, prompts))} tokens: {new / wall:.0f} tokens/s, "
        f"prefill {seconds['prefill']:.1f} s, decode {seconds['decode']:.1f} s")
    say("log-probs: engine against full forward {:.4f}, full forwards with two attention kernels "
        "{:.4f}".format(*attention_noise(policy, items[:16:2])))
    bench_rows(policy)
    if "compare" in sys.argv:
        del engine
        compare_transformers(policy)


def bench_train(folder):
    """Prints the speed of updates on a random model of QwQ-32B's shape, its pool kept."""
    policy = large_policy(folder)
    engine = kevin.Engine(policy, 64, 0.9, 17_000)
    say(f"pool of {len(engine.uses) * 256} tokens, {torch.cuda.memory_allocated() / 1e9:.1f} GB")
    bench_rows(policy)


def bench_rows(policy):
    """Prints tokens a second of updates and of log-probabilities, with the pool in memory."""
    config = kevin.Config()
    optimizer = torch.optim.AdamW(policy.trainable(), lr=1e-5)
    for length in (8192, 8192, 16384):
        ids = [i % 150_000 for i in range(0, 7 * length, 7)]
        turn = make_turn(prompt_ids=ids[:1024], completion_ids=ids[1024:], advantage=1.0,
                         sampling_logprobs=[])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.time()
        [sample_] = kevin.store_logprobs(policy, [turn], config)
        torch.cuda.synchronize()
        stored = time.time() - start
        kevin.update(policy, optimizer, [sample_], 1, config, lambda tensor: tensor)
        torch.cuda.synchronize()
        update = time.time() - start - stored
        say(f"row of {length}: log-probs {length / stored:.0f} tokens/s, update "
            f"{length / update:.0f} tokens/s, peak {gigabytes():.1f} GB")


def compare_transformers(policy):
    """Prints the speed of transformers' own generate and generate_batch."""
    torch.cuda.empty_cache()
    lm, shape = policy.lm, policy.base.config
    cache = transformers.DynamicCache()
    for layer in range(shape.num_hidden_layers):
        cache.update(*(torch.randn(64, 8, 2048, 128, device="cuda", dtype=torch.bfloat16)
                       for _ in "kv"), layer)
    ids = torch.randint(0, 150_000, (64, 2049), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    times = []
    for count in (2, 2, 6):
        torch.cuda.synchronize()
        start = time.time()
        lm.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, do_sample=True,
                    max_new_tokens=count, min_new_tokens=count, temperature=0.9, top_k=0)
        torch.cuda.synchronize()
        times.append(time.time() - start)
        cache.crop(2048)
    seconds = (times[2] - times[1]) / 4
    say(f"generate, 64 x 2048, one row padded: {64 / seconds:.0f} tokens/s")
    del cache
    torch.cuda.empty_cache()
    prompts, times = torch.randint(0, 150_000, (16, 2048)).tolist(), []
    for count in (4, 4, 20):
        settings = transformers.GenerationConfig(
            max_new_tokens=count, do_sample=True, temperature=0.9, eos_token_id=-1, pad_token_id=0)
        start = time.time()
        found = policy.base.generate_batch(prompts, generation_config=settings, progress_bar=False)
        assert len(found) == 16 and all(len(f.generated_tokens) == count for f in found.values())
        times.append(time.time() - start)
    say(f"generate_batch, 16 x 2048: {16 * 16 / (times[2] - times[1]):.0f} tokens/s")


ELEMENTWISE = """Okay, one thread an element.
</think>
```python
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = '''
__global__ void apply_kernel(const float* x, float* out, int64_t n) {
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) { float v = x[i]; out[i] = %s; }
}
torch::Tensor apply(torch::Tensor x) {
    auto out = torch::empty_like(x);
    int64_t n = x.numel();
    apply_kernel<<<(n + %d - 1) / %d, %d>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
    return out;
}
'''
ext = load_inline(name="ext", cpp_sources="torch::Tensor apply(torch::Tensor x);",
                  cuda_sources=source, functions=["apply"])


class ModelNew(nn.Module):
    def forward(self, x):
        return ext.apply(x)
```
One thread an element.
"""


def bench_step(folder):
    """Trains a random model of QwQ-32B's shape, and prints where the time goes.

    Its noise is replaced by kernels, right and wrong ones for the tasks, before they are judged.
    An answer ends somewhere between half of TOKENS and one and a half, as real ones end apart.
    Arguments: run folder, which is gone on with, and steps. TASKS and TOKENS set the size.
    """
    run, steps, size = Path(sys.argv[3]), int(sys.argv[4]), int(os.environ.get("TOKENS", 400))
    rows = [json.loads(line) for line in (ROOT / "tasks.jsonl").read_text().splitlines()]
    chosen = [r for r in rows if r["id"] in os.environ.get("TASKS", "L1-019 L1-022").split()]
    rank, lines = int(os.environ.get("RANK", 0)), (run / "metrics.jsonl")
    seen = len(lines.read_text().splitlines()) if lines.exists() else 0
    inputs = Path(f"{run}-inputs")
    large_folder(f"{folder}/inputs")
    Path(folder, "inputs/tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in chosen))
    with contextlib.suppress(OSError):  # another process, or the run's first one, made them
        Path(folder, "inputs").rename(inputs)
    texts = [ELEMENTWISE % (e, b, b, b) for b in (64, 128, 256, 512)
             for e in ("v > 0.f ? v : 0.f", "tanhf(v)", "1.f / (1.f + expf(-v))")]
    random.Random(1).shuffle(texts)
    kevin.Policy.decode = lambda self, ids: texts[sum(ids[:20]) % len(texts)]
    config = kevin.Config(
        tasks=f"{inputs}/tasks.jsonl", model=str(inputs), random_weights=True, turns=2,
        tasks_per_step=len(chosen), trajectories=8, max_new_tokens=size * 3 // 2,
        late_new_tokens=size * 3 // 2, max_prompt_tokens=4096, cache=f"{run}-cache", steps=steps,
        out=str(run))
    ask = kevin.Engine.add
    kevin.Engine.add = lambda self, item: ask(self, replace(
        item, max_new_tokens=item.draws.randrange(size // 2, size * 3 // 2)))
    train_step, policies = kevin.train_step, []
    kevin.train_step = lambda policy, *rest: (
        policies.append(policy), train_step(policy, *rest))[1]
    kevin.train(config)
    mark = hashlib.sha256(weights(policies[0]).cpu().numpy().tobytes()).hexdigest()[:16]
    say(f"rank {rank}: adapter {mark}, peak {gigabytes():.1f} GB")
    for line in [] if rank else lines.read_text().splitlines()[seen:]:
        metrics = json.loads(line)
        parts = {k[5:]: v for k, v in metrics.items() if k.startswith("time/")}
        say(f"step {metrics['step'] + 1}: " + ", ".join(
            f"{k} {v:.1f} s" for k, v in sorted(parts.items(), key=lambda p: -p[1])))
        say(f"  correct {metrics['kernel/correct']:.0%}, sampling gap "
            f"{metrics['policy/sampling_gap']:.3f}, gradient {metrics['policy/grad_norm']:.3g}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o755)
        {"judge": bench_judge, "soak": bench_soak, "rollout": bench_rollout, "train": bench_train,
         "step": bench_step}[sys.argv[2]](temporary)
