//! One recorded operation in ggml's form. One of the places of this crate with `unsafe` in it.
//!
//! What ggml asserts about layout in memory (contiguous rows, contiguous tensors) is met here, by copying where a view does not
//! fit; and between fused and composed forms is chosen by what the device supports.

use std::cell::RefCell;
use std::collections::HashMap;

use sd_backend::{Backend, DType, DeviceKind};
use sd_ggml_sys as sys;

use crate::convolution::Convolution;
use crate::graph::Node;
use crate::op::{Binary, Norm, Op, Pairing, Unary};
use crate::raw::{Arena, ArenaFull, RawTensor, bytes_on};
use crate::snake;

/// Most ggml tensors that one recorded operation becomes, the copies of its operands included.
pub(crate) const TENSORS_PER_OPERATION: usize = 16;

/// Fewer rows than these are multiplied in F32 by kernels of their own.
const FEWEST_HALVED_ROWS: i64 = 32;

pub(crate) struct Lowering<'a> {
    pub arena: &'a Arena,
    pub backend: &'a Backend,
    /// What was cast to half precision for products, by what it was.
    pub halved: RefCell<HashMap<RawTensor, RawTensor>>,
    /// Contiguous copies, by what they are of.
    pub copies: RefCell<HashMap<RawTensor, RawTensor>>,
}

impl Lowering<'_> {
    /// Whether a processor computes: a remote device does not say.
    fn may_be_processor(&self) -> bool {
        let device = self.backend.device();
        device.kind() == DeviceKind::Cpu || device.is_remote()
    }

    /// Builds `node` from its lowered sources.
    pub(crate) fn operation(
        &self,
        node: &Node,
        sources: &[RawTensor],
    ) -> Result<RawTensor, ArenaFull> {
        let ctx = self.arena.as_ptr();
        let ne = node.shape.to_ne();
        // SAFETY: `ctx` is live with room for TENSORS_PER_OPERATION tensors, and no arm makes more; `sources` are live
        // tensors of it. Shapes and types were checked when the node was recorded; contiguity is established below
        // (`rows` for operations that walk rows, `whole` for those that walk all elements).
        unsafe {
            let raw = match (&node.op, sources) {
                (Op::Binary(op), &[a, b]) => {
                    let (a, b) = (self.rows(a)?, self.rows(b)?);
                    let build = match op {
                        Binary::Add => sys::ggml_add,
                        Binary::Sub => sys::ggml_sub,
                        Binary::Mul => sys::ggml_mul,
                        Binary::Div => sys::ggml_div,
                    };
                    build(ctx, a.as_ptr(), b.as_ptr())
                }
                (&Op::Affine { scale, offset }, &[x]) => {
                    sys::ggml_scale_bias(ctx, self.plain(x)?.as_ptr(), scale, offset)
                }
                (Op::Unary(Unary::GeluTanh), &[x]) if self.may_be_processor() => {
                    self.gelu_tanh(self.whole(x)?)
                }
                (Op::Unary(op), &[x]) => {
                    let build = match op {
                        Unary::Silu => sys::ggml_silu,
                        Unary::GeluTanh => sys::ggml_gelu,
                        Unary::GeluErf => sys::ggml_gelu_erf,
                        Unary::Tanh => sys::ggml_tanh,
                        Unary::Sigmoid => sys::ggml_sigmoid,
                        Unary::Sin => sys::ggml_sin,
                        Unary::Square => sys::ggml_sqr,
                        Unary::Exp => sys::ggml_exp,
                    };
                    build(ctx, self.whole(x)?.as_ptr())
                }
                (&Op::Norm { kind, eps }, &[x]) => {
                    let build = match kind {
                        Norm::Layer => sys::ggml_norm,
                        Norm::Rms => sys::ggml_rms_norm,
                        Norm::L2 => sys::ggml_l2_norm,
                    };
                    build(ctx, self.rows(x)?.as_ptr(), eps)
                }
                (Op::MatMul, &[x, w]) => self.matmul(w, x)?,
                (&Op::Softmax { scale }, &[x]) => sys::ggml_soft_max_ext(
                    ctx,
                    self.whole(x)?.as_ptr(),
                    std::ptr::null_mut(),
                    scale,
                    0.0,
                ),
                (&Op::Attention { scale }, &[q, k, v]) => self.attention(q, k, v, None, scale)?,
                (&Op::Attention { scale }, &[q, k, v, mask]) => {
                    self.attention(q, k, v, Some(mask), scale)?
                }
                (Op::Reshape, &[x]) => {
                    sys::ggml_reshape_4d(ctx, self.whole(x)?.as_ptr(), ne[0], ne[1], ne[2], ne[3])
                }
                (Op::Permute { axes }, &[x]) => {
                    // ggml asks where each of its dimensions goes; dimensions beyond the rank stay.
                    let rank = axes.len();
                    let mut to = [0, 1, 2, 3];
                    for (result, &source) in axes.iter().enumerate() {
                        to[rank - 1 - source] = (rank - 1 - result) as i32;
                    }
                    sys::ggml_permute(ctx, x.as_ptr(), to[0], to[1], to[2], to[3])
                }
                (&Op::Slice { axis, start, step }, &[x]) => {
                    // ggml's views have their elements side by side.
                    let x = self.rows(x)?;
                    let mut nb = x.as_ref().nb;
                    let stride = &mut nb[node.shape.ggml_axis(axis) as usize];
                    let offset = start * *stride;
                    *stride *= step;
                    sys::ggml_view_4d(
                        ctx,
                        x.as_ptr(),
                        ne[0],
                        ne[1],
                        ne[2],
                        ne[3],
                        nb[1],
                        nb[2],
                        nb[3],
                        offset,
                    )
                }
                (&Op::Concat { axis }, &[a, b]) => {
                    let (a, b) = (self.whole(a)?, self.whole(b)?);
                    sys::ggml_concat(ctx, a.as_ptr(), b.as_ptr(), node.shape.ggml_axis(axis))
                }
                (Op::Rows, &[table, index]) => {
                    sys::ggml_get_rows(ctx, self.rows(table)?.as_ptr(), self.whole(index)?.as_ptr())
                }
                (
                    &Op::Conv2d {
                        stride,
                        padding,
                        dilation,
                        by,
                    },
                    &[x, kernel],
                ) => {
                    let steps = [stride as i32, dilation as i32];
                    let padding = padding.map(|side| side as i32);
                    self.conv2d(self.whole(kernel)?, self.whole(x)?, steps, padding, by)?
                }
                (Op::UpscaleNearest, &[x]) => sys::ggml_interpolate(
                    ctx,
                    self.whole(x)?.as_ptr(),
                    ne[0],
                    ne[1],
                    ne[2],
                    ne[3],
                    sys::GGML_SCALE_MODE_NEAREST,
                ),
                (&Op::PadEnd { rows, columns }, &[x]) => sys::ggml_pad(
                    ctx,
                    self.whole(x)?.as_ptr(),
                    columns as i32,
                    rows as i32,
                    0,
                    0,
                ),
                (&Op::PadCircular { rows, columns }, &[x]) => {
                    let (rows, columns) = (rows as i32, columns as i32);
                    sys::ggml_pad_ext_circular(
                        ctx,
                        self.whole(x)?.as_ptr(),
                        columns,
                        columns,
                        rows,
                        rows,
                        0,
                        0,
                        0,
                        0,
                    )
                }
                (
                    &Op::TurnPairs {
                        pairing,
                        first,
                        pairs,
                    },
                    &[x, positions, divisors],
                ) => {
                    let mode = match pairing {
                        Pairing::Neighbours => sys::GGML_ROPE_TYPE_NORMAL,
                        Pairing::Halves => sys::GGML_ROPE_TYPE_NEOX,
                    };
                    // Base 1 leaves all frequencies to the divisors; without extension the betas are not read.
                    let turned = sys::ggml_rope_ext(
                        ctx,
                        self.rows(x)?.as_ptr(),
                        self.whole(positions)?.as_ptr(),
                        self.whole(divisors)?.as_ptr(),
                        2 * pairs as i32,
                        mode as i32,
                        0,
                        1.0,
                        1.0,
                        0.0,
                        1.0,
                        0.0,
                        0.0,
                    );
                    sys::ggml_rope_set_offset(non_null(turned)?.as_ptr(), first as i32)
                }
                (Op::Snake, sources) => {
                    let mut sources = sources
                        .iter()
                        .map(|&source| Ok(self.whole(source)?.as_ptr()))
                        .collect::<Result<Vec<_>, ArenaFull>>()?;
                    // As many threads as there are.
                    const THREADS: i32 = -1;
                    sys::ggml_custom_4d(
                        ctx,
                        node.dtype.to_ggml(),
                        ne[0],
                        ne[1],
                        ne[2],
                        ne[3],
                        sources.as_mut_ptr(),
                        sources.len() as i32,
                        Some(snake::compute),
                        THREADS,
                        std::ptr::null_mut(),
                    )
                }
                (Op::Cast, &[x]) => {
                    // A cast to the same type would be a view of nothing new; a copy keeps the rule that it is fresh.
                    sys::ggml_cast(ctx, self.whole(x)?.as_ptr(), node.dtype.to_ggml())
                }
                // Leaves never come here, and `ops` records each operation with its own number of operands.
                _ => return Err(ArenaFull),
            };
            non_null(raw)
        }
    }

    /// `x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))`, which is tanh-GELU. The processor's own looks it up in a table of
    /// half-precision numbers: an error of 1e-3.
    ///
    /// # Safety
    /// As for `operation`; `x` is contiguous.
    unsafe fn gelu_tanh(&self, x: RawTensor) -> *mut sys::ggml_tensor {
        const SLOPE: f32 = 1.595_769_2;
        let (ctx, x) = (self.arena.as_ptr(), x.as_ptr());
        // SAFETY: all operands have the shape of `x` and are contiguous; the rest is the caller's promise.
        unsafe {
            let bent = sys::ggml_scale_bias(ctx, sys::ggml_sqr(ctx, x), SLOPE * 0.044_715, SLOPE);
            sys::ggml_mul(ctx, sys::ggml_sigmoid(ctx, sys::ggml_mul(ctx, bent, x)), x)
        }
    }

    /// `x w^T`.
    ///
    /// # Safety
    /// As for `operation`.
    unsafe fn matmul(
        &self,
        w: RawTensor,
        x: RawTensor,
    ) -> Result<*mut sys::ggml_tensor, ArenaFull> {
        // SAFETY: rows of both are contiguous, a transposed weight is copied first, the rest is the caller's promise.
        unsafe {
            let mut w = self.rows(w)?;
            if sys::ggml_is_transposed(w.as_ptr()) {
                w = self.copy(w)?;
            }
            let x = self.rows(x)?;
            if let Some(halved) = self.halved(w, x)? {
                let product = sys::ggml_mul_mat(self.arena.as_ptr(), w.as_ptr(), halved.as_ptr());
                if self.backend.supports(product) {
                    return Ok(product);
                }
            }
            Ok(sys::ggml_mul_mat(
                self.arena.as_ptr(),
                w.as_ptr(),
                x.as_ptr(),
            ))
        }
    }

    /// `x` in the type of a BF16 weight, once for all weights that it is multiplied with, where the device would cast it for
    /// each: CUDA does.
    ///
    /// # Safety
    /// As for `operation`.
    unsafe fn halved(&self, w: RawTensor, x: RawTensor) -> Result<Option<RawTensor>, ArenaFull> {
        // SAFETY: both tensors are live; the cast has the shape of `x`.
        unsafe {
            let (weight, values) = (w.as_ref(), x.as_ref());
            // A few rows are multiplied by kernels that read F32.
            let is_wanted = weight.type_ == sys::GGML_TYPE_BF16
                && values.type_ == sys::GGML_TYPE_F32
                && values.ne[1] >= FEWEST_HALVED_ROWS
                && self.backend.device().backend_name() == "CUDA";
            if !is_wanted {
                return Ok(None);
            }
            let mut halved = self.halved.borrow_mut();
            if let Some(found) = halved.get(&x) {
                return Ok(Some(*found));
            }
            let cast = sys::ggml_cast(self.arena.as_ptr(), self.whole(x)?.as_ptr(), weight.type_);
            let cast = non_null(cast)?;
            if !self.backend.supports(cast.as_ptr()) {
                return Ok(None);
            }
            // What the operands of a product of two share of its memory must not be used for the cast of it, so that a device may
            // do both at once: a third source, which nobody reads, keeps it.
            if values.op == sys::GGML_OP_MUL && (*values.src[1]).op == sys::GGML_OP_UNARY {
                (*cast.as_ptr()).src[2] = values.src[1];
            }
            halved.insert(x, cast);
            Ok(Some(cast))
        }
    }

    /// Fused attention where the device has it, else product, softmax, product.
    ///
    /// # Safety
    /// As for `operation`.
    unsafe fn attention(
        &self,
        q: RawTensor,
        k: RawTensor,
        v: RawTensor,
        mask: Option<RawTensor>,
        scale: f32,
    ) -> Result<*mut sys::ggml_tensor, ArenaFull> {
        let ctx = self.arena.as_ptr();
        // SAFETY: shapes and types were checked when recorded; rows are made contiguous, masks wholly so.
        unsafe {
            let mask = match mask {
                Some(mask) => self.whole(mask)?.as_ptr(),
                None => std::ptr::null_mut(),
            };
            let (q, k, v) = (self.rows(q)?, self.rows(k)?, self.rows(v)?);
            let fused = sys::ggml_flash_attn_ext(
                ctx,
                q.as_ptr(),
                k.as_ptr(),
                v.as_ptr(),
                mask,
                scale,
                0.0,
                0.0,
            );
            if !fused.is_null() && self.backend.supports(fused) {
                sys::ggml_flash_attn_ext_set_prec(fused, sys::GGML_PREC_F32);
                return Ok(fused);
            }
            let scores = self.matmul(k, q)?;
            let weights = sys::ggml_soft_max_ext(ctx, scores, mask, scale, 0.0);
            // [kv_heads, tokens, e] -> [kv_heads, e, tokens], so that a product can run along the tokens.
            let values = self.copy(non_null(sys::ggml_transpose(ctx, v.as_ptr()))?)?;
            let mixed = sys::ggml_mul_mat(ctx, values.as_ptr(), weights);
            Ok(self
                .copy(non_null(sys::ggml_permute(ctx, mixed, 0, 2, 1, 3))?)?
                .as_ptr())
        }
    }

    /// Convolution: in the way that is asked for or measured to be best; patches times kernel where the device has no
    /// operation of its own.
    ///
    /// # Safety
    /// As for `operation`; both operands are contiguous.
    unsafe fn conv2d(
        &self,
        kernel: RawTensor,
        x: RawTensor,
        [stride, dilation]: [i32; 2],
        [rows, columns]: [i32; 2],
        by: Option<Convolution>,
    ) -> Result<*mut sys::ggml_tensor, ArenaFull> {
        let ctx = self.arena.as_ptr();
        // SAFETY: shapes were checked when recorded, contiguity by the caller.
        unsafe {
            let direct = sys::ggml_conv_2d_direct(
                ctx,
                kernel.as_ptr(),
                x.as_ptr(),
                stride,
                stride,
                columns,
                rows,
                dilation,
                dilation,
            );
            let dtype = match kernel.as_ref().type_ {
                sys::GGML_TYPE_F16 => DType::F16,
                _ => DType::F32,
            };
            let is_direct = !direct.is_null() && {
                // [kw, kh, in, out] and [w, h, out, n]: as many patches as pixels of the result.
                let [kw, kh, input, _] = kernel.as_ref().ne;
                let [width, height, _, count] = (*direct).ne;
                let element = sys::ggml_type_size(kernel.as_ref().type_) as i64;
                let sides = [kw, kh, input, width, height, count, element];
                let bytes = sides.into_iter().fold(1_u64, |product, side| {
                    product.saturating_mul(side.unsigned_abs())
                });
                let device = self.backend.device();
                // An operation that asks for memory beside its result packs the picture for the device's matrix units.
                let packs = || {
                    RawTensor::new(direct).is_some_and(|direct| {
                        bytes_on(direct, device) > sys::ggml_nbytes(direct.as_ptr())
                    })
                };
                let best = || match !device.is_remote() && packs() {
                    true => Convolution::Direct,
                    false => Convolution::best(device, dtype, bytes),
                };
                by.unwrap_or_else(best) == Convolution::Direct
            };
            if is_direct && self.backend.supports(direct) {
                return Ok(direct);
            }
            let [kw, kh, input, output] = kernel.as_ref().ne;
            let patches = non_null(sys::ggml_im2col(
                ctx,
                kernel.as_ptr(),
                x.as_ptr(),
                stride,
                stride,
                columns,
                rows,
                dilation,
                dilation,
                true,
                kernel.as_ref().type_,
            ))?;
            let [depth, width, height, count] = patches.as_ref().ne;
            let rows = sys::ggml_reshape_2d(ctx, patches.as_ptr(), depth, width * height * count);
            let flat = sys::ggml_reshape_2d(ctx, kernel.as_ptr(), kw * kh * input, output);
            let product = sys::ggml_mul_mat(ctx, rows, flat);
            let channels_first = sys::ggml_reshape_4d(ctx, product, width, height, count, output);
            let frames_first = sys::ggml_permute(ctx, channels_first, 0, 1, 3, 2);
            Ok(self.whole(non_null(frames_first)?)?.as_ptr())
        }
    }

    /// `x`, copied unless its rows are contiguous and lie behind one another. A single row of a transposed matrix looks
    /// contiguous with the next row one element further: libraries of products refuse that.
    ///
    /// # Safety
    /// As for `operation`.
    pub(crate) unsafe fn rows(&self, x: RawTensor) -> Result<RawTensor, ArenaFull> {
        // SAFETY: `x` is live.
        unsafe {
            let tensor = x.as_ref();
            let is_contiguous = tensor.nb[0] == sys::ggml_type_size(tensor.type_);
            let is_apart = tensor.nb[1] >= sys::ggml_row_size(tensor.type_, tensor.ne[0]);
            if is_contiguous && is_apart {
                Ok(x)
            } else {
                self.copy(x)
            }
        }
    }

    /// `x`, copied unless all of it is contiguous. A dimension of 1 counts as contiguous for ggml wherever the next element
    /// would lie, but operations assert that the elements of a row lie side by side.
    ///
    /// # Safety
    /// As for `operation`.
    pub(crate) unsafe fn whole(&self, x: RawTensor) -> Result<RawTensor, ArenaFull> {
        // SAFETY: `x` is live.
        unsafe {
            let side_by_side = x.as_ref().nb[0] == sys::ggml_type_size(x.as_ref().type_);
            if side_by_side && sys::ggml_is_contiguous(x.as_ptr()) {
                Ok(x)
            } else {
                self.copy(x)
            }
        }
    }

    /// `x` as [`Lowering::whole`] gives it, with the strides that its sizes alone would have. Scaling asserts these of dimensions of 1
    /// too, which a view of one row has from what it shows.
    ///
    /// # Safety
    /// As for `operation`.
    unsafe fn plain(&self, x: RawTensor) -> Result<RawTensor, ArenaFull> {
        // SAFETY: `x` is live, and the arena has room for a copy and a view; what `whole` gives is contiguous, as the view asks.
        unsafe {
            let x = self.whole(x)?;
            let (ne, nb) = (x.as_ref().ne, x.as_ref().nb);
            let is_plain = (0..ne.len() - 1)
                .all(|axis| nb[axis + 1] == nb[axis].wrapping_mul(ne[axis] as usize));
            if is_plain {
                return Ok(x);
            }
            let [a, b, c, d] = ne;
            non_null(sys::ggml_reshape_4d(
                self.arena.as_ptr(),
                x.as_ptr(),
                a,
                b,
                c,
                d,
            ))
        }
    }

    /// A contiguous copy, one for all who ask for it.
    ///
    /// # Safety
    /// As for `operation`.
    pub(crate) unsafe fn copy(&self, x: RawTensor) -> Result<RawTensor, ArenaFull> {
        if let Some(found) = self.copies.borrow().get(&x) {
            return Ok(*found);
        }
        // SAFETY: `x` is live and the arena has room.
        let copy = non_null(unsafe { sys::ggml_cont(self.arena.as_ptr(), x.as_ptr()) })?;
        self.copies.borrow_mut().insert(x, copy);
        Ok(copy)
    }
}

pub(crate) fn non_null(raw: *mut sys::ggml_tensor) -> Result<RawTensor, ArenaFull> {
    RawTensor::new(raw).ok_or(ArenaFull)
}
