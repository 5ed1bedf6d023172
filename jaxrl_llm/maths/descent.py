"""One optimiser step that refuses non-finite numbers, and the split into micro-batches: shared by policies and critics."""
import jax
import jax.numpy as jnp
import optax


def split(tree, parts: int):
    """Cuts the leading axis of every leaf into `parts` equal pieces: `[P, ...] -> [parts, P / parts, ...]`."""
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), tree)


def keep_finite(new, old):
    """`new`, or `old` if some number is NaN or infinite in `new` but finite in `old`: states survive refused batches."""
    broken = [jnp.any(~jnp.isfinite(a) & jnp.isfinite(b)) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old))
              if jnp.issubdtype(a.dtype, jnp.inexact)]
    bad = jnp.any(jnp.stack(broken)) if broken else False
    return jax.tree.map(lambda a, b: jnp.where(bad, b, a), new, old)


def descend(optimizer: optax.GradientTransformation, clip_norm: float | None, grads, loss: jax.Array, tree, opt_state,
            rate: jax.Array | None = None):
    """One optimiser step, refused if loss, gradient or step is not finite, or if the whole gradient is 0.

    The gradient is scaled to `clip_norm` if its global norm is larger, the step by `rate` if there is one. Returns `(tree,
    opt_state, norm, finite)`. Of the step only the smallest leaf is looked at: a rate that is not finite shows in each of them,
    and to look at all would compute the step twice, or need memory for old and new moments at once. Entries of a gradient whose
    norm is finite are below 2e19: rates of up to 1e18 move no weight beyond float32.
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    scale = 1.0 if clip_norm is None else jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))

    def move(tree, opt_state):
        clipped = jax.tree.map(lambda g: g * scale, grads)  # inside the branch, so that no scaled copy is written to memory
        changes, opt_state = optimizer.update(clipped, opt_state, tree)
        if rate is not None:
            changes = jax.tree.map(lambda change: (rate * change).astype(change.dtype), changes)
        return optax.apply_updates(tree, changes), opt_state

    moved = min(jax.tree.leaves(move(tree, opt_state)[0]), key=jnp.size)  # what this leaf does not need is not computed
    finite &= jnp.isfinite(moved).all()
    # A branch, not a `where`: old and new weights need not both exist.
    tree, opt_state = jax.lax.cond(finite & (norm > 0), move, lambda *old: old, tree, opt_state)
    return tree, opt_state, norm, finite
