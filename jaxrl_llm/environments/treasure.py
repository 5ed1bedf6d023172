"""A text adventure, generated from a seed: a maze of rooms with a key and a chest that the key opens."""
import dataclasses
import random
import re

from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.shortest import shortest_way
from jaxrl_llm.tasks.base import Problem, disjoint_task

Place = tuple[int, int]
DIRECTIONS: dict[str, Place] = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
NAMES = ("cellar", "kitchen", "library", "chapel", "armoury", "pantry", "study", "attic", "stable", "well room", "gallery",
         "workshop", "crypt", "larder", "tower room", "laundry", "vault", "nursery", "scullery", "observatory", "guard room",
         "music room", "greenhouse", "oratory", "forge")
RULES = ("You are in a maze of rooms. Somewhere lies a key, somewhere stands a chest. Find the key, take it, and open the "
         "chest. Say one command in a message: go north, go east, go south, go west, take key, open chest.")
_COMMAND = re.compile(r"\b(?:go (north|east|south|west)|(take key)|(open chest))\b")


@dataclasses.dataclass
class Maze:
    """Rooms with their `doors` (directions by place) and `names`, and the places of player, key (None: taken) and chest.

    `left` counts the remaining commands; `brief`: whether descriptions are short.
    """

    doors: dict[Place, set[str]]
    names: dict[Place, str]
    here: Place
    key: Place | None
    chest: Place
    left: int
    brief: bool = False


@environment
def treasure(*, size: int = 3, mazes: int = 1000, heldout: int = 200, seed: int = 0, brief: bool = False) -> Environment:
    """Mazes of `size` times `size` rooms. The return is 1 for the open chest, else 0.

    The number of messages is limited to three times the length of the shortest solution, plus four. The last command in a
    message counts; an impossible one costs a message, and the answer says so. `brief` texts, for small models, omit the rules
    and the names of rooms. Raises ValueError for a size other than 2 to 5.
    """
    if not 2 <= size <= 5:
        raise ValueError(f"size={size}; allowed are 2 to 5")

    def build(number_of_maze: int, number: int) -> Problem:
        return Problem(({"role": "user", "content": RULES},), "", number, f"{size}x{size}", {"maze": number_of_maze})

    def reset(problem: Problem, key: int) -> tuple[Maze, list[Message]]:
        maze = make_maze(size, f"{seed} {problem.extra['maze']}")
        maze.brief = brief
        return maze, [{"role": "user", "content": describe(maze) if brief else f"{RULES}\n\n{describe(maze)}"}]

    numbers = list(range(mazes + heldout))
    task = disjoint_task(f"treasure/{size}x{size}", numbers[:mazes], numbers[mazes:], build, reward="environment")
    return Environment(name="treasure", task=task, reset=reset, step=_step, oracle=best_command,
                       choices=lambda maze: [*(f"go {direction}" for direction in DIRECTIONS), "take key", "open chest"])


def make_maze(size: int, seed: str) -> Maze:
    """A spanning tree of the grid by a random walk from the first room, and one more door if there is room for one."""
    chance = random.Random(seed)
    places = [(x, y) for x in range(size) for y in range(size)]
    doors: dict[Place, set[str]] = {place: set() for place in places}
    trail, seen = [places[0]], {places[0]}
    while trail:
        ways = [(name, other) for name in DIRECTIONS if (other := _beside(trail[-1], name)) in doors and other not in seen]
        if not ways:
            trail.pop()
            continue
        name, other = chance.choice(ways)
        _connect(doors, trail[-1], name)
        seen.add(other)
        trail.append(other)
    closed = [(place, name) for place in places for name in DIRECTIONS
              if _beside(place, name) in doors and name not in doors[place]]
    if closed:
        _connect(doors, *chance.choice(closed))
    here, key, chest = chance.sample(places, 3)
    maze = Maze(doors, dict(zip(places, chance.sample(NAMES, len(places)))), here, key, chest, 0)
    maze.left = 3 * (len(_way(maze, here, key)) + len(_way(maze, key, chest)) + 2) + 4
    return maze


def describe(maze: Maze) -> str:
    """The text of what the player sees."""
    doors = ", ".join(name for name in DIRECTIONS if name in maze.doors[maze.here])
    if maze.brief:
        things = [("key", maze.key == maze.here), ("chest", maze.chest == maze.here), ("have key", maze.key is None)]
        return ". ".join([doors, *(text for text, there in things if there)])
    seen = [f"You are in the {maze.names[maze.here]}.", f"Doors lead {doors}."]
    seen += ["A key lies here."] * (maze.key == maze.here) + ["A locked chest stands here."] * (maze.chest == maze.here)
    return " ".join([*seen, "You have the key."] if maze.key is None else seen)


def best_command(maze: Maze) -> str:
    """The next command of a shortest solution."""
    target = maze.chest if maze.key is None else maze.key
    if maze.here == target:
        return "open chest" if maze.key is None else "take key"
    return f"go {_way(maze, maze.here, target)[0]}"


def _step(maze: Maze, message: Message) -> Turn:
    commands = _COMMAND.findall(message["content"].lower())
    direction, take, unlock = commands[-1] if commands else ("", "", "")
    info = {"state": [*maze.here, maze.key is None], "action": f"go {direction}" if direction else take or unlock}
    maze.left -= 1
    said = "Nothing happens."
    if direction and direction in maze.doors[maze.here]:
        maze.here, said = _beside(maze.here, direction), ""
    elif direction:
        said = f"There is no door to the {direction}."
    elif take and maze.key == maze.here:
        maze.key, said = None, "Taken."
    elif unlock and maze.here == maze.chest and maze.key is None:
        return Turn(reward=1.0, done=True, info={**info, "commands_left": maze.left})
    if maze.left <= 0:
        return Turn(done=True, info={**info, "commands_left": 0})
    return Turn([{"role": "user", "content": f"{said} {describe(maze)}".strip()}], info=info)


def _beside(place: Place, direction: str) -> Place:
    return place[0] + DIRECTIONS[direction][0], place[1] + DIRECTIONS[direction][1]


def _connect(doors: dict[Place, set[str]], place: Place, direction: str) -> None:
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[direction]
    doors[place].add(direction)
    doors[_beside(place, direction)].add(back)


def _way(maze: Maze, start: Place, end: Place) -> list[str]:
    """The directions of a shortest path."""
    return shortest_way(start, lambda place: place == end,
                        lambda place: ((name, _beside(place, name)) for name in DIRECTIONS if name in maze.doors[place]))
