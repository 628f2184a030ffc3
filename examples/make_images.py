"""Makes small images in a folder, with a subfolder for each class: python make_images.py FOLDER"""

import random
import sys
from pathlib import Path

from PIL import Image


def main() -> None:
    folder = Path(sys.argv[1])
    random.seed(0)
    for name, low in (("dark", 0), ("light", 128)):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            pixels = bytes(random.randrange(low, low + 128) for _ in range(16 * 16 * 3))
            Image.frombytes("RGB", (16, 16), pixels).save(folder / name / f"{number}.png")
    print(f"24 images in 2 classes below {folder}")


if __name__ == "__main__":
    main()
