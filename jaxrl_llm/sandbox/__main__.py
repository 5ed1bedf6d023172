"""`python -m jaxrl_llm.sandbox`: which barriers hold on this machine, mode by mode."""
from jaxrl_llm import sandbox

if __name__ == "__main__":
    for found in sandbox.probes():
        print(found)
    print(f"programs run in mode {sandbox.best().mode!r}")
