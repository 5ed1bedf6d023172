"""How long the random attacks last, and which they are: `JAXRL_LLM_FUZZ=100 JAXRL_LLM_FUZZ_SEED=1`, by default 1 and 0."""
import os

TIMES, SEED = int(os.environ.get("JAXRL_LLM_FUZZ", "1")), int(os.environ.get("JAXRL_LLM_FUZZ_SEED", "0"))
