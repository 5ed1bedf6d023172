"""The console command `jaxrl_llm COMMAND [OPTIONS]`: runs the module of a command as `python -m MODULE [OPTIONS]` would."""
import runpy
import sys

from jaxrl_llm.tools.registry import one_of

COMMANDS = {  # command: its module, what it does
    "train": ("jaxrl_llm.experiments.train", "trains a language model by reinforcement learning, or on texts"),
    "evaluate": ("jaxrl_llm.experiments.evaluate", "measures a policy on held-out problems"),
    "compare": ("jaxrl_llm.experiments.compare", "runs methods and seeds at equal compute and reports which is better"),
    "export": ("jaxrl_llm.experiments.export", "writes the model of a run as a Hugging Face directory"),
    "serve": ("jaxrl_llm.experiments.serve", "a model over HTTP, in OpenAI's format"),
    "show": ("jaxrl_llm.experiments.show", "shows runs in the terminal and as one page"),
    "diagnose": ("jaxrl_llm.experiments.diagnose", "diagnostics of finished runs by name, with figures"),
    "plan": ("jaxrl_llm.experiments.plan", "memory and ideal time of a step on hardware that need not be there"),
    "methods": ("jaxrl_llm.methods", "the catalogue of methods"),
    "search": ("jaxrl_llm.commands.search", "finds methods, keys, recipes, tasks, rewards and environments by words"),
    "audit": ("jaxrl_llm.audits.environments", "what an environment pays to policies that deserve nothing"),
    "replay": ("jaxrl_llm.audits.replay", "plays a trajectory again that the environment of a run lost"),
}


def usage() -> str:
    rows = (f"  {name:10}{what}" for name, (_, what) in COMMANDS.items())
    return "\n".join(["usage: jaxrl_llm COMMAND [OPTIONS]     jaxrl_llm COMMAND --help: the options", "", *rows])


def main() -> None:
    """Runs the command; exit code 2 for a command that does not exist, else the command's own."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(usage())
        return
    try:
        module, _ = COMMANDS[one_of("command", command, COMMANDS)]
    except ValueError as error:
        print(f"{error}\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
