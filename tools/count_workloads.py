"""Count the work of the simulator's networks, at 224 pixels and with 1,000 classes, into src/megabatch/simulate.

python tools/count_workloads.py
"""

from pathlib import Path

import msgspec

from megabatch.models.catalog import ModelSettings
from megabatch.preflight.count import count_workload
from megabatch.simulate.workload import STORED

OUT = Path(__file__).parents[1] / "src/megabatch/simulate/workloads"

if __name__ == "__main__":
    for name in STORED:
        workload = count_workload(ModelSettings(name=name), image_size=224, num_classes=1000)
        (OUT / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(workload), indent=1) + b"\n")
        gflops = [f"{1e-9 * flops:.2f}" for flops in (workload.forward_flops, workload.backward_flops)]
        print(f"{name}: {workload.num_parameters:,} parameters, GFLOP per image {' forward, '.join(gflops)} backward")
