"""The names of what lies in a run's folder."""

LOCK = ".lock"
CONFIG = "config.toml"  # the recipe, resolved
ENVIRONMENT = "env.json"
PLAN = "plan.json"  # planning.tuning.Tuning: how gradients are all-reduced
METRICS = "metrics.jsonl"  # a row per step and evaluation
SUMMARY = "summary.json"  # what they add up to
LOG = "train.log"
MISTAKES = "mistakes.json"  # runs.mistakes.Mistakes: what the newest evaluation took for what
STEP_TRACE = "step.json"  # runs.step_trace.StepTrace: one step of rank 0, and its all-reduces
TIMELINE = "timeline"  # a trace of each rank, if wanted
CHECKPOINTS = "checkpoints"
WEIGHTS = "model.safetensors"
MODEL = "model.json"  # runs.model_card.ModelCard: what belongs to the weights
