"""Names of the files in a run's folder."""

LOCK = ".lock"
CONFIG = "config.toml"  # the resolved recipe
ENVIRONMENT = "env.json"
PLAN = "plan.json"  # planning.tuning.Tuning: how gradients are all-reduced
METRICS = "metrics.jsonl"  # one row per step and evaluation
SUMMARY = "summary.json"  # records.Summary: the totals of all rows
LOG = "train.log"
MISTAKES = "mistakes.json"  # records.Mistakes: confusions of the newest evaluation
STEP_TRACE = "step.json"  # records.StepTrace: one step of rank 0 and its all-reduces
MLLOG = "mllog.txt"  # MLPerf's log, if enabled
TIMELINE = "timeline"  # a trace of each rank, if enabled
CHECKPOINTS = "checkpoints"
WEIGHTS = "model.safetensors"
MODEL = "model.json"  # model_card.ModelCard: metadata of the weights
