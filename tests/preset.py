"""Runs one of the two scripts with other constants, as a preset does; the tests' way to start them.

    python tests/preset.py ref_server '[{"MODEL": "...", "PORT": 1234}]'
    deepspeed tests/preset.py grpo_ref_split '[{"MODEL": "...", "RUN_DIR": "..."}, ...]'
    python tests/preset.py grpo_ref_split:worker '[{"MODEL": "..."}]'    # not main(), but worker()

Several presets are run one after another in the same process, which saves DeepSpeed's slow start.
"""

import importlib
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]  # HERE for tasks/even.py

if __name__ == "__main__":
    role, presets = (word for word in sys.argv[1:] if not word.startswith("--local_rank="))
    (name, _, function), presets = role.partition(":"), json.loads(presets)
    script = importlib.import_module(name)
    for preset in presets:
        for name in [name for name in preset if "." in name]:  # of a module other than the script
            module, _, constant = name.rpartition(".")
            target = importlib.import_module(module)
            assert hasattr(target, constant), name
            setattr(target, constant, preset.pop(name))
        getattr(script, function or "main")(**preset)
