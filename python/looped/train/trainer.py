"""`train`: run a `TrainConfig`, with checkpoints that a killed run resumes from bit-exactly.

A run's folder holds `train.json` (the configuration), `state.pt` (everything that resuming needs, replaced atomically),
`log.jsonl` (one line per logged step), `provenance.jsonl` (what code and machine, one line per start) and, at the end, `model/`
(safetensors and JSON); or, of a run that diverged, `diverged.json`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from looped.checkpoint import REMEDY_OF_STATE, load_training_state, save_model, write_atomically, write_training_state
from looped.icl.tasks import PromptPool, Task
from looped.model import LoopedTransformer
from looped.train import divergence, provenance, record
from looped.train.device import usable_device
from looped.train.identity import differences
from looped.train.loss import loops_are_fused, matrix_products, window_errors
from looped.train.optimizers import by_name, make_optimizers, state_of
from looped.train.recipe import TrainConfig
from looped.train.shortfall import shortfall
from looped.train.state import check_fields, check_state

log = logging.getLogger(__name__)

LOG_EVERY = 20
JUDGED = 64  # prompts, at least, that weights are judged on before they are written
DOUBTED = 3  # steps in a row whose loss explodes, that no prompts clear
CPU = torch.device("cpu")


@dataclass
class Run:
    """The mutable state of a training run: what a checkpoint holds."""

    config: TrainConfig
    model: LoopedTransformer
    optimizers: dict[str, torch.optim.Optimizer]
    prompt_rng: torch.Generator
    task: Task
    pool: PromptPool | None = None
    device: torch.device = CPU
    step: int = 0
    seconds: float = 0.0
    n_exploded: int = 0  # steps in a row; a checkpoint begins anew

    @classmethod
    def start(cls, config: TrainConfig, device: torch.device | str = "cpu") -> Run:
        """A run at step 0: weights and prompts from `config.seed`; the global generator is left as it was.

        Prompts and weights are drawn on the CPU, so that they are the same on every device.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would seed those of GPUs too
            model = LoopedTransformer(config.model).to(device)
        rng, task, pool = torch.Generator().manual_seed(config.seed), config.make_task(), None
        if config.n_distinct is not None:
            pool = PromptPool.of(task, config.n_distinct, config.points.end, seed=config.seed)
            rng = torch.Generator().manual_seed(config.seed ^ 0x5EED)  # the order of the batches is no part of the set
        return cls(config, model, make_optimizers(config, model), rng, task, pool, torch.device(device))

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": state_of(self.optimizers),
            "prompt_rng": self.prompt_rng.get_state(),
            "arithmetic": {
                "torch": str(torch.__version__),
                "threads": torch.get_num_threads(),
                "device": self.device.type,
                "fused": loops_are_fused(self.model),
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `to_dict` gave. Raises ValueError, before any of it is taken, for what does not fit the run."""
        check_state(state, n_steps=self.config.n_steps, model=self.model, optimizers=self.optimizers, rng=self.prompt_rng)
        self.step, self.seconds = int(state["step"]), state["seconds"]
        self.model.load_state_dict(state["model"])
        for name, part in by_name(state["optimizer"], self.optimizers).items():
            self.optimizers[name].load_state_dict(part)
        self.prompt_rng.set_state(state["prompt_rng"])
        here = self.to_dict()["arithmetic"]
        if here != state.get("arithmetic", here):
            log.warning("this run was made with %s and goes on with %s: it will differ in rounding", state["arithmetic"], here)

    def advance(self) -> dict[str, Any]:
        """One optimizer step on fresh prompts. Returns the numbers for the log.

        Raises FloatingPointError, naming the step, where the loss or its gradient is not finite, and where it has exploded
        (`looped.train.divergence`). The weights are then those before the step.
        """
        config, step = self.config, self.step
        n_live, n_points, n_loops = config.dims.at(step), config.points.at(step), config.loops.at(step)
        settles = step >= config.settle_from
        if settles and config.extra_loops:
            n_loops += int(torch.randint(config.extra_loops + 1, (), generator=self.prompt_rng))
        if self.pool is None:
            pairs = self.task.sample(config.batch_size, n_points, generator=self.prompt_rng, n_live=n_live)
        else:
            pairs = self.pool.sample(config.batch_size, generator=self.prompt_rng)
        xs, ys = (part.to(self.device) for part in pairs)
        with matrix_products(config.precision):
            errors, change = window_errors(
                self.model, xs, ys, n_loops=n_loops, window=config.window, precision=config.precision
            )
            error = errors.mean()
            loss = error + config.rest_weight * change.square().mean() if settles and config.rest_weight else error
            self.model.zero_grad(set_to_none=True)
            loss.backward()
        limit = math.inf if config.grad_clip is None else config.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = config.lr_at(step)
        numbers = {
            "step": step + 1,
            "loss": loss.item(),
            "loss_last_loop": errors[:, -1].mean().item(),
            "loss_last_point": errors[:, -1, -1].mean().item(),
            "change": change.mean().item(),
            "n_live": n_live,
            "n_points": n_points,
            "n_loops": n_loops,
            "lr": config.lr_at(step),
            "grad_norm": norm.item(),
        }
        self.n_exploded = divergence.count_exploded(self.n_exploded, error.item(), divergence.of_nothing(config, ys))
        divergence.check(step + 1, numbers["loss"], numbers["grad_norm"], self.n_exploded)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.step += 1
        return numbers

    def is_sound(self) -> bool:
        """Whether neither the last steps' losses nor the error of the weights they led to, on other prompts, has exploded.

        The loss of a step or two may do so by its prompts: of few, all may have answers near 0.
        The prompts are fresh functions of the last step's curriculum; the run draws nothing and is left as it is.
        """
        if self.n_exploded >= DOUBTED:
            return False
        config, step = self.config, max(0, self.step - 1)
        n_live, n_points, n_loops = config.dims.at(step), config.points.at(step), config.loops.at(step)
        rng = torch.Generator().manual_seed(config.seed ^ 0x50FD)
        pairs = self.task.sample(max(config.batch_size, JUDGED), n_points, generator=rng, n_live=n_live)
        xs, ys = (part.to(self.device) for part in pairs)
        return divergence.is_sound(config, self.model, xs, ys, n_loops=n_loops)


def train(
    config: TrainConfig,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    progress: bool = True,
    device: torch.device | str = "cpu",
) -> LoopedTransformer:
    """Train, and leave the model in `folder`/model. Returns it on the device.

    resume: go on from the folder's last checkpoint, if it has one; the result is bit for bit that of a run that was never
    stopped (same thread count, device and torch). An interrupt (Ctrl-C, SIGTERM) finishes the step, writes a checkpoint and
    then raises KeyboardInterrupt. progress: show a bar on standard error. device: where to compute; prompts are drawn on the
    CPU.

    Raises ValueError for a device that does not work here, for tables that cannot be trained on, where the folder holds a run
    and `resume` is False, or a run or models of another configuration, how often it is saved and where its tables lie apart;
    OSError where a checkpoint cannot be written (the one before it is left whole); FloatingPointError where training diverges
    or ends while it does (the last checkpoint before it, if there is one, is kept, `diverged.json` says where, and resuming
    raises it again). Weights are written, as a checkpoint, a copy or the final model, only once their own error on a batch that
    training does not see is found to be no exploded one (`looped.train.divergence`): the loss of a step is that before it.
    """
    folder, device, config = Path(folder), usable_device(device), config.with_data_named()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        return _train(config, folder, resume, progress, device)


def train_seeds(
    config: TrainConfig,
    folder: str | os.PathLike[str],
    seeds: Sequence[int],
    *,
    resume: bool = False,
    progress: bool = True,
    device: torch.device | str = "cpu",
) -> list[LoopedTransformer]:
    """`train` once for every seed, one after the other, in `folder`/seed_S. Raises ValueError for a seed that comes twice."""
    if len(set(seeds)) < len(seeds) or not seeds:
        raise ValueError(f"train_seeds: needs seeds of their own, got {list(seeds)}")
    runs = [(dataclasses.replace(config, seed=seed), Path(folder) / f"seed_{seed}") for seed in seeds]
    return [train(one, place, resume=resume, progress=progress, device=device) for one, place in runs]


def _train(config: TrainConfig, folder: Path, resume: bool, progress: bool, device: torch.device) -> LoopedTransformer:
    run = Run.start(config, device)
    if (folder / "state.pt").exists():
        _load_into(run, folder, resume)
    else:
        record.refuse_other_models(config, folder)
    divergence.forget_or_raise(config, folder, resume)
    for leftover in folder.glob("*.partial"):  # of a process that was killed while it wrote
        leftover.unlink(missing_ok=True)
    record.write_record(config, folder)
    if missing := shortfall(config):
        log.warning("train: n_steps=%s is shorter than the curriculum: %s", config.n_steps, missing)
    _drop_log_after(folder / "log.jsonl", run.step)
    provenance.record(folder, step=run.step, device=run.device, fused=loops_are_fused(run.model))
    saved_step = run.step

    def kept() -> str:
        return f"the checkpoint of step {saved_step} is whole, resume from it" if saved_step else "there is no checkpoint yet"

    def diverge(step: int, reason: str) -> FloatingPointError:
        divergence.note(config, folder, step, saved_step or None, reason)
        last = f"last checkpoint: step {saved_step}" if saved_step else "there is no checkpoint yet"
        return FloatingPointError(f"{reason} ({last})")

    def save() -> None:
        nonlocal saved_step
        run.n_exploded = 0  # as of a run that is resumed from here
        try:
            write_training_state(folder / "state.pt", run.to_dict())
        except OSError as error:
            raise OSError(
                error.errno,
                f"train: cannot write the checkpoint of step {run.step} ({error.strerror}); {kept()}; make room",
            ) from error
        saved_step = run.step

    bar = tqdm(total=config.n_steps, initial=run.step, disable=not progress, unit="step", dynamic_ncols=True)
    with bar, open(folder / "log.jsonl", "a") as log_file, _stop_requested() as stop:
        while run.step < config.n_steps:
            begin = time.perf_counter()
            try:
                numbers = run.advance()
            except FloatingPointError as error:
                raise diverge(run.step + 1, str(error)) from None
            took = time.perf_counter() - begin
            run.seconds += took
            bar.update()
            if run.step % LOG_EVERY == 0 or run.step == config.n_steps:
                numbers |= {"prompts_per_second": config.batch_size / took, "seconds": run.seconds}
                bar.set_postfix(
                    loss=f"{numbers['loss']:.4g}",
                    loops=numbers["n_loops"],
                    prompts_per_s=f"{config.batch_size / took:.0f}",
                )
                try:
                    log_file.write(json.dumps(numbers) + "\n")
                    log_file.flush()
                except OSError as error:
                    text = (
                        f"train: cannot write {folder / 'log.jsonl'} at step {run.step} ({error.strerror}); {kept()}; make room"
                    )
                    raise OSError(error.errno, text) from error
            keeps = config.keep_every and run.step % config.keep_every == 0
            due = run.step % config.save_every == 0 or run.step == config.n_steps or stop.is_set()
            is_sound = (keeps or due) and run.is_sound()  # an exploded state would take the place of the last good one
            if keeps and is_sound:  # before the checkpoint, or a crash could skip it
                save_model(run.model, folder / f"model_{run.step}")
            elif keeps:
                log.warning("train: there is no model_%s: the loss explodes", run.step)
            if due and is_sound:
                save()
            elif due and run.step < config.n_steps and not stop.is_set():
                log.warning("train: there is no checkpoint of step %s: the loss explodes", run.step)
            if stop.is_set():
                at = f"step {run.step}"
                if saved_step != run.step:
                    at += f" while its loss explodes, which is not kept ({kept()})"
                raise KeyboardInterrupt(f"train: stopped at {at}; the same with --resume (resume=True) goes on")
    if not run.is_sound():
        raise diverge(run.step, divergence.at_the_end(run.step, run.n_exploded))
    save_model(run.model, folder / "model")
    return run.model


def _load_into(run: Run, folder: Path, resume: bool) -> None:
    if not resume:
        is_own = (folder / record.FILE).is_file() and record.is_record_of(folder / record.FILE, run.config)
        remedy = "; resume it or choose another folder" if is_own else ", of other settings; choose another folder or remove it"
        raise ValueError(f"train: {folder} already holds a run{remedy}")
    path = folder / "state.pt"
    state = load_training_state(path)
    try:
        check_fields(state)
        different = differences(run.config, state["config"])
        if not different:
            run.load(state)
    except ValueError as error:
        raise ValueError(f"train: {path} is no checkpoint of a run: {error}; {REMEDY_OF_STATE}") from error
    if different:
        raise ValueError(
            f"train: the run in {folder} has another {', '.join(different)}; use its values, or another folder, or remove it"
        )


def _drop_log_after(path: Path, step: int) -> None:
    """Forget logged steps after the checkpoint, which will be run again, and lines that are none (cut short by a crash)."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            logged = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(logged, int) and logged <= step:
            kept.append(line + "\n")
    write_atomically(path, "".join(kept).encode())


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the run's folder for this process; the lock goes with the process, however that ends."""
    with open(folder / ".lock", "w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"train: another process trains in {folder}; wait for it or choose another folder") from None
        except ImportError:  # no such locks on Windows
            pass
        yield


@contextmanager
def _stop_requested() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, so that a step is never cut in half. A no-op outside the main thread."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
