//! MiniMax H3: text, pictures, clips and sound to a clip with sound.

pub mod video_vae;
