"""In-context learning: tasks, prompts, baselines, evaluation."""
