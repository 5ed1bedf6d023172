"""A server of OpenEnv whose environment hides a number; it can hang, raise, and end. The tests start it with PORT."""
import os
import random
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: str


class Seen(Observation):
    text: str
    tries: int = 0


class Hidden(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.hidden, self._state = 0, State(episode_id="x", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.hidden, self._state = random.Random(seed).randint(1, 9), State(episode_id="x", step_count=0)
        return Seen(text="A number from 1 to 9.")

    def step(self, action, timeout_s=None, **kwargs):
        sent = action.number.strip()
        if sent == "hang":
            time.sleep(60)
        if sent == "die":
            os._exit(3)
        if sent == "raise":
            raise KeyError("no such number")
        self._state.step_count += 1
        number = int(sent) if sent.isdigit() else 0
        text = "Right." if number == self.hidden else "Higher." if number < self.hidden else "Lower."
        return Seen(text=text, tries=self._state.step_count, reward=float(number == self.hidden), done=number == self.hidden)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Hidden, Guess, Seen, max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
