"""`python -m jaxrl_llm.sandbox`: which barriers hold on this machine, mode by mode."""
from jaxrl_llm import sandbox

if __name__ == "__main__":
    for probe in sandbox.probes():
        print(probe)
    print(f"programs run in mode {sandbox.best().mode!r}")
