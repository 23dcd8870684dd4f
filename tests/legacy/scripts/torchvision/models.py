# SPDX-License-Identifier: Apache-2.0
"""`resnet50` with the parts of one, and a hundredth of its size."""

import torch
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width // 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width // 2)
        self.conv2 = nn.Conv2d(width // 2, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


def resnet50() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 7, stride=8, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)]
    return nn.Sequential(*stem, Bottleneck(8), Bottleneck(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
