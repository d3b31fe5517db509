"""Your own environment in about 20 lines: a point is pushed to a goal."""

import gymnasium as gym
import numpy as np


class PointMass(gym.Env):
    observation_space = gym.spaces.Box(-3, 3, (4,), np.float32)  # where the goal is from here, velocity
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)  # force

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.append(self.np_random.uniform(-1, 1, 2), [0, 0])
        return self.state.astype(np.float32), {}

    def step(self, action):
        velocity = 0.9 * self.state[2:] + 0.02 * action
        self.state = np.append(np.clip(self.state[:2] - velocity, -2, 2), velocity)
        reward = np.exp(-4 * np.sum(self.state[:2] ** 2))  # 1 at the goal
        return self.state.astype(np.float32), float(reward), False, False, {}  # never terminated, never truncated


def make_env():
    return gym.wrappers.TimeLimit(PointMass(), max_episode_steps=100)
