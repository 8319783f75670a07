"""A plan to look at: tables, or one line."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from peagle_train.planning.plan import Options, Plan, plan_of
from peagle_train.run import Run
from peagle_train.training.memory import GIB


def print_plan(plan: Plan, console: Console, *, refusals: bool = True) -> None:
    """All of a plan. refusals: what cannot be, too; else somebody else tells that."""
    if plan.note is not None:
        _say(console, f"note: {plan.note}", "yellow")
    for table in (_head(plan), _data(plan), _training(plan), _memory(plan), _serving(plan)):
        console.print(table)
        console.print()
    for text in plan.warnings:
        _say(console, f"warning: {text}", "yellow")
    for text in plan.refusals if refusals else ():
        _say(console, f"cannot be: {text}", "bold red")


def in_short(plan: Plan) -> str:
    """The plan in one line: what `peagle run` says before it begins."""
    peak = plan.chosen.plan.peak if plan.chosen.plan is not None else None
    memory = "does not fit" if peak is None else f"{peak / GIB:,.1f} GiB a process"
    parts = [
        f"head {_count(plan.head.total)}, {_count(plan.head.trained)} trained",
        f"{memory} ({plan.chosen.launch.name})",
        f"{plan.disk.needed / 1e9:,.1f} GB of disk",
        f"{plan.answer_tokens:,} tokens to answer",
        f"{plan.work.steps:,} steps, {_epochs(plan)}",
        f"training about {_hours(plan.hours.train)}",
    ]
    more = len(plan.warnings) + len(plan.refusals)
    told = f" and {more} {'warning' if more == 1 else 'warnings'}" if more else ""
    return f"plan: {'; '.join(parts)}; all of it{told}: peagle plan {plan.source}"


def run_in_short(run: Run) -> str:
    """The plan of a run that begins, in one line."""
    return in_short(plan_of(run.recipe, run.facts, run.source, Options()))


def _head(plan: Plan) -> Table:
    config, facts = plan.head.head.config, plan.facts
    table = _table(f"{plan.recipe.method} head for {facts.model} ({facts.class_name})")
    table.add_row(
        "layers", f"{config.num_layers} of {config.hidden_size:,}, MLP {config.intermediate_size:,}"
    )
    table.add_row(
        "attention",
        f"{config.num_attention_heads} heads, {config.num_key_value_heads} of keys and values, "
        f"{config.head_dim} wide",
    )
    table.add_row("aux layers", ", ".join(map(str, config.aux_layers)))
    table.add_row("vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens are drafted")
    table.add_row("parameters", f"{plan.head.total:,}, of which {plan.head.trained:,} are trained")
    table.add_row("exported", f"{plan.head.exported / 1e9:,.2f} GB in {plan.recipe.export.dtype}")
    return table


def _data(plan: Plan) -> Table:
    disk, lengths = plan.disk, plan.lengths
    table = _table("data and disk")
    rows = "unknown" if lengths.train.rows is None else f"{lengths.train.rows:,}"
    table.add_row(
        "training rows",
        f"{rows}, {lengths.train.mean_row:,.0f} tokens each, {lengths.train.mean_answer:,.0f} of them the "
        "answer",
    )
    if lengths.train.cut is not None:
        table.add_row("answers cut", f"{100 * lengths.train.cut:.1f} % at data.max_new_tokens")
    table.add_row("lengths from", lengths.source)
    table.add_row("to answer", f"{plan.answer_tokens:,} tokens, all sets{_answer_hours(plan)}")
    states = f"{_gb(disk.states)}, at most {_gb(disk.states_at_most)} ({disk.mode})"
    table.add_row("hidden states", states + (f", at {disk.elsewhere}" if disk.elsewhere else ""))
    table.add_row("answers, checkpoints", f"{_gb(disk.answers)}, {_gb(disk.training)}")
    table.add_row("disk of `output`", f"{_gb(disk.needed)} needed, {_gb(disk.free)} free")
    return table


def _training(plan: Plan) -> Table:
    work = plan.work
    table = _table(f"training: {plan.chosen.launch.name}, processes: {plan.chosen.launch.processes}")
    table.add_row("steps", f"{work.steps:,}, {_epochs(plan)}")
    table.add_row("tokens", f"{work.tokens_per_step:,.0f} a step, {work.tokens / 1e6:,.1f} million in all")
    table.add_row("operations", f"{_operations(work.operations_per_step)} a step")
    table.add_row("time", f"about {_hours(plan.hours.train)}")
    table.add_row("rate", plan.hours.train_rate)
    return table


def _memory(plan: Plan) -> Table:
    table = Table(title="memory of one process, GiB", title_justify="left")
    table.add_column("launch")
    for heading in ("processes", "weights", "states", "real slots", "rest", "peak", "budget"):
        table.add_column(heading, justify="right")
    for rank in plan.ranks:
        cut = rank.plan
        name = f"{rank.launch.name} ({rank.device})"
        style = "bold" if rank is plan.chosen else None
        if cut is None:
            table.add_row(
                name, str(rank.launch.processes), *["–"] * 4, "too large", _gib(rank.budget), style="red"
            )
            continue
        figures = (cut.resident, cut.states, cut.real, cut.step, cut.peak, cut.budget)
        table.add_row(name, str(rank.launch.processes), *map(_gib, figures), style=style)
    return table


def _serving(plan: Plan) -> Table:
    table = _table("serving with vLLM")
    for part in plan.serving:
        table.add_row(part.name, part.text, style=None if part.good else "red")
    return table


def _table(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _epochs(plan: Plan) -> str:
    epochs = plan.work.epochs
    return "epochs unknown" if epochs is None else f"{epochs:,.2f} epochs"


def _answer_hours(plan: Plan) -> str:
    return "" if plan.hours.answer is None else f", about {_hours(plan.hours.answer)}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def _operations(count: float) -> str:
    return f"{count / 1e12:,.1f} TFLOP" if count >= 1e12 else f"{count / 1e9:,.2f} GFLOP"


def _gb(size: float) -> str:
    return f"{size / 1e12:,.2f} TB" if size >= 1e12 else f"{size / 1e9:,.2f} GB"


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"


def _say(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
