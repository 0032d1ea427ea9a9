"""timm: an optimizer by its name, and an average: python examples/timm_training.py"""

import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

import fuseopt

torch.manual_seed(0)
model = VisionTransformer(
    img_size=16, patch_size=4, num_classes=4, embed_dim=32, depth=2, num_heads=2
)
optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, layer_decay=0.8)
fuseopt.compile(optimizer)  # the one line
average = ModelEmaV3(model, decay=0.99)

for number in range(20):
    classes = torch.randint(4, (8,))
    images = torch.randn(8, 3, 16, 16) + classes[:, None, None, None]
    loss = torch.nn.functional.cross_entropy(model(images), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model, step=number)

print(f"loss {loss.item():.3f}")
(report,) = fuseopt.reports()
print(f"launches of a step: {report.launches}, for {report.lanes} parameters")
