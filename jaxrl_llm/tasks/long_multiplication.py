"""Products of a number with a digit, whose solutions write every step with its carry; no download."""
import numpy as np

from jaxrl_llm.tasks.base import Problem, Task, disjoint_task, split_position, task

SIZE = 20_000  # larger spaces are sampled


@task
def long_multiplication(*, digits: int = 3, most: int = 9, heldout_fraction: float = 0.2, size: int | None = None,
                        seed: int = 0) -> Task:
    """Products such as `"347*6="`, solved from the ones on: `"7*6+0=42;4*6+4=28;3*6+2=20;2082"`.

    A step has the digit, the factor, the carry and their sum; the last number is the product, which the reward reads.
    `extra["solution"]` has these steps, for methods that imitate. A policy from scratch never finds them by sampling.

    Args:
      digits: of the number.  most: the largest digit; the least is 1 in the number, and 2 as the factor.
      size: problems before the split, drawn with `seed`; None: all `most**digits * (most - 1)`, at most 20,000.
    Raises ValueError for numbers out of their range.
    """
    for name, value, least, largest in (("digits", digits, 1, 8), ("most", most, 2, 9)):
        if not least <= value <= largest:
            raise ValueError(f"long_multiplication({name}={value}): give {least} to {largest}")
    sizes = (most,) * digits + (most - 1,)
    space = int(np.prod(sizes))
    wanted = min(space, SIZE) if size is None else size
    if not 0 < wanted <= space:
        raise ValueError(f"long_multiplication(size={size}): there are {space} products of {digits} digits up to {most}; give "
                         f"1 to {space}")
    chosen = np.arange(space) if wanted == space else np.random.default_rng(seed).choice(space, wanted, replace=False)
    sides: tuple[list, list] = ([], [])
    for *number, factor in np.transpose(np.unravel_index(chosen, sizes)).tolist():
        pair = int("".join(str(digit + 1) for digit in number)), factor + 2
        sides[split_position(f"{pair[0]}*{pair[1]}") < heldout_fraction].append(pair)

    def build(pair: tuple[int, int], index: int) -> Problem:
        left, right = pair
        return Problem(f"{left}*{right}=", str(left * right), index, f"{digits} digits", {"solution": steps(left, right)})

    return disjoint_task(f"long_multiplication/{digits}", *sides, build, reward="last_number")


def steps(number: int, factor: int) -> str:
    """The written multiplication of a number with a digit, from the ones on, and the product."""
    carry, written = 0, []
    for digit in map(int, reversed(str(number))):
        total = digit * factor + carry
        written.append(f"{digit}*{factor}+{carry}={total}")
        carry = total // 10
    return ";".join([*written, str(number * factor)])
