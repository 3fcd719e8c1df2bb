"""The run as one picture: losses, their difference, the sinks, and the log-probabilities."""
import torch


def smooth(values, width=25):
    padded = torch.cat([torch.zeros(1, dtype=torch.float64), torch.tensor(values, dtype=torch.float64).cumsum(0)])
    width = min(width, len(values))
    return ((padded[width:] - padded[:-width]) / width).tolist()


def draw(report, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    loss, difference, sinks, histogram = axes.flatten()
    runs = report["runs"]
    for name, style in (("eager", {"linewidth": 3, "alpha": 0.5}), ("basin", {"linewidth": 1})):
        curve = smooth(runs[name]["loss"])
        loss.plot(range(len(curve)), curve, label=f"{name}, held out {runs[name]['held_out_loss']:.3f}", **style)
    loss.set(title="training loss (mean of 25 steps)", xlabel="step", ylabel="nats per token")
    loss.legend()
    delta = [a - b for a, b in zip(runs["basin"]["loss"], runs["eager"]["loss"])]
    difference.plot(delta, linewidth=0.5, alpha=0.5, label="each step")
    difference.plot(range(len(smooth(delta))), smooth(delta), label="mean of 25 steps")
    difference.set(title="loss with basin minus loss with eager", xlabel="step", ylabel="nats per token")
    difference.legend()
    moves = torch.tensor(runs["basin"]["sinks"])  # [points, layers, heads]
    for layer in range(moves.shape[1]):
        for head in range(moves.shape[2]):
            sinks.plot(runs["basin"]["sink_steps"], moves[:, layer, head], color=f"C{layer}", linewidth=0.8,
                       linestyle="-" if report["windows"][layer] else "--", label=f"layer {layer}" if head == 0 else None)
    sinks.set(title="sink logits with basin (dashed: full layers)", xlabel="step")
    sinks.legend()
    for name, values in report.get("log_probability_differences", {}).items():
        histogram.hist([abs(x) for x in values], bins=[0, *(10 ** (e / 4) for e in range(-24, 5))], histtype="step", label=name)
        histogram.legend()
    histogram.set(title="|log-probability, trainer minus decode|", xlabel="nats", ylabel="tokens", yscale="log")
    histogram.set_xscale("symlog", linthresh=1e-6)
    histogram.set_xlim(left=0)
    figure.savefig(path, dpi=110)
