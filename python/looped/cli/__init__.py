"""The command line: `looped eval`, `bench`, `train`, `experiment`, `info`, and those of looped.programs."""

from looped.cli.arguments import EVAL_TOLERANCE
from looped.cli.bench import bench_command
from looped.cli.evaluate import evaluate_command
from looped.cli.experiment import experiment_command
from looped.cli.group import main
from looped.cli.info import info_command
from looped.cli.train import train_command
from looped.programs.commands import add_to as add_program_commands

__all__ = ["EVAL_TOLERANCE", "main"]

for _command in (evaluate_command, bench_command, train_command, experiment_command, info_command):
    main.add_command(_command)
add_program_commands(main)
