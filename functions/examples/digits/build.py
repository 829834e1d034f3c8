"""
Trains the digit classifier: seeded, a few seconds, at least 97 % right on images that it has not seen.

Needs scikit-learn for its images; the function itself does not: ``pip install 'gpufaas[examples]'``.
"""

import torch
from digits_cnn import DigitsCnn, split
from safetensors.torch import save_file
from torch.nn import functional as F

EPOCHS = 15
BATCH = 64


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    (images, labels), (held_images, held_labels) = split()
    x = torch.tensor(images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(labels)
    model = DigitsCnn()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    steps = EPOCHS * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        model.train()
        order = torch.randperm(len(x))
        for chosen in order.split(BATCH):
            loss = F.cross_entropy(model(shifted(x[chosen])), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}")
    model.eval()
    with torch.inference_mode():
        held_x = torch.tensor(held_images, dtype=torch.float32)[:, None] / 16
        right = model(held_x).argmax(1).eq(torch.tensor(held_labels)).float().mean().item()
    print(f"{right:.1%} of {len(held_labels)} held-out images are right")
    if right < 0.97:
        raise SystemExit(f"only {right:.1%} right on held-out images, at least 97 % expected")
    save_file(model.state_dict(), "weights.safetensors")


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Move the batch by up to a pixel: writers do not centre their digits alike."""
    down, right = (int(each) for each in torch.randint(-1, 2, (2,)))
    return F.pad(images, (1, 1, 1, 1))[:, :, 1 - down : 9 - down, 1 - right : 9 - right]


main()
