"""One process for all GPUs, with a thread for each: python data_parallel.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.randn(640, 32)
    data = TensorDataset(inputs, inputs.argmax(1) % 10)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    model = nn.DataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.2f} after {len(loader)} steps, in one process")


if __name__ == "__main__":
    main()
