"""Your own environment with dicts of observations and actions: a cart is pushed to the lit lamp, and presses there."""

import gymnasium as gym
import numpy as np

LAMPS = 3


class Lamps(gym.Env):
    observation_space = gym.spaces.Dict(
        {
            "camera": gym.spaces.Box(0, 255, (48, 48, 3), np.uint8),  # a white cart, below it the lamps
            "speed": gym.spaces.Box(-1, 1, (1,), np.float32),
            "lit": gym.spaces.Discrete(LAMPS),  # which lamp is on
        }
    )
    action_space = gym.spaces.Dict(
        {"push": gym.spaces.Box(-1, 1, (1,), np.float32), "press": gym.spaces.MultiBinary(1)}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed = self.np_random.uniform(0, 1), 0.0
        self.lit = int(self.np_random.integers(LAMPS))
        return self.observe(), {}

    def step(self, action):
        self.speed = 0.8 * self.speed + 0.05 * float(action["push"][0])
        self.place = float(np.clip(self.place + self.speed, 0, 1))
        there = min(int(self.place * LAMPS), LAMPS - 1) == self.lit
        reward = float(action["press"][0]) * (1.0 if there else -0.5)
        if reward > 0:  # another lamp goes on
            self.lit = (self.lit + int(self.np_random.integers(1, LAMPS))) % LAMPS
        return self.observe(), reward, False, False, {}

    def observe(self):
        camera = np.zeros((48, 48, 3), np.uint8)
        at = int(self.place * 44)
        camera[8:24, at : at + 4] = 255
        camera[32:40, 16 * self.lit : 16 * self.lit + 16] = (255, 160, 0)
        return {"camera": camera, "speed": np.float32([self.speed]), "lit": self.lit}


def make_env():
    return gym.wrappers.TimeLimit(Lamps(), max_episode_steps=64)
