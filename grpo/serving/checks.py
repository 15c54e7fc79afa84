"""What the constants of ref_server.py must be."""

from grpo.constants import DTYPES, refuse_broken, rules_of

SERVER = {
    "a whole number from 1 on": """SCORE_BATCH_TOKENS THREADS MAX_STORE_BYTES MAX_BODY_BYTES
        MAX_POLICY_BYTES""",
    "a whole number from 0 on": "PORT",
    "a number from 0 on": "TEMPERATURE LEASE_SECONDS LEASE_WAIT_SECONDS",
    "True or False": "SHARE_PROMPTS",
    "a text": "MODEL HOST STORE",
}


def check_server_constants(now):
    """Raises SystemExit with a sentence for each that is not; `now` has their values by name."""
    dtype = ("DTYPE", f"one of {', '.join(DTYPES)}", now["DTYPE"] in DTYPES)
    refuse_broken("ref_server.py", now, [*rules_of(SERVER, now), dtype])
    body, wait = now["MAX_BODY_BYTES"], now["LEASE_WAIT_SECONDS"]
    patient = "below LEASE_SECONDS, and below 60, when clients give up"
    rules = [
        ("TEMPERATURE", "above 0", now["TEMPERATURE"] > 0),
        ("PORT", "65535 at most; 0 is any that is free", now["PORT"] <= 65535),
        ("LEASE_WAIT_SECONDS", patient, wait < min(now["LEASE_SECONDS"], 60)),
        ("MAX_BODY_BYTES", "1 MB at least: 1 << 20", body >= 1 << 20),
        ("MAX_STORE_BYTES", "MAX_BODY_BYTES or more", now["MAX_STORE_BYTES"] >= body),
    ]
    refuse_broken("ref_server.py", now, rules)
