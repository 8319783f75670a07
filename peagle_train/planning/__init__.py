"""What a recipe will cost, before anything is spent: head, memory, disk, steps, hours, serving.

    lengths.py    how long rows will be            disk.py      bytes of answers, states, checkpoints
    work.py       operations, steps, hours         ranks.py     memory of one process, per launch file
    serving.py    what vLLM needs of the pair      advice.py    warnings with their cures
    plan.py       all of it, and what is refused   report.py    tables, one line, JSON

No weight is read and no GPU is needed. Every figure comes from the code that the run itself uses: the head on
torch's meta device, the engine's memory plan, the packing of rows; what had to be assumed is named.
"""

from peagle_train.planning.plan import Options, Plan, plan_of, plan_recipe, require
from peagle_train.planning.report import in_short, print_plan

__all__ = ["Options", "Plan", "in_short", "plan_of", "plan_recipe", "print_plan", "require"]
